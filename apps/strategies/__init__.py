"""How the ranks of a task share one training. A new strategy is a class and a line here."""

from __future__ import annotations

from apps.contract import CENTRAL, Training, averages_weights
from apps.data import Preview
from apps.experiment import Supervised
from apps.strategies.allreduce import Ddp, Horovod
from apps.strategies.base import Strategy
from apps.strategies.downpour import Downpour
from apps.strategies.easgd import Easgd
from apps.strategies.gem import Gem
from apps.strategies.local import Local
from apps.strategies.pipeline import Pipeline
from apps.strategies.sharded import Sharded
from apps.strategies.tensor import Tensor
from apps.topology import Topology

STRATEGIES = {
    ("local", None): Local,
    ("allreduce", "horovod"): Horovod,
    ("allreduce", "ddp"): Ddp,
    ("sharded", None): Sharded,
    ("tensor", None): Tensor,
    ("pipeline", None): Pipeline,
    ("downpour", None): Downpour,
    ("easgd", None): Easgd,
    ("gem", None): Gem,
}


def group_size(training: Training, topology: Topology) -> int:
    """How many of those that read batches of their own share each step."""
    ranks = topology.ranks
    apart = training.strategy in CENTRAL or averages_weights(training)
    return ranks.per_worker if apart else ranks.readers


def create(
    training: Training,
    experiment: Supervised,
    topology: Topology,
    preview: Preview,
) -> Strategy:
    """Set up the strategy that the study names; collective."""
    backend = training.backend if training.strategy == "allreduce" else None
    strategy = STRATEGIES[training.strategy, backend]
    return strategy(experiment, topology, training, preview)
