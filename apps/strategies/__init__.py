"""How the ranks of a task share one training. A new strategy is a class and a line here."""

from __future__ import annotations

from apps.contract import CENTRAL, Training
from apps.experiment import Supervised
from apps.strategies.allreduce import Ddp, Horovod
from apps.strategies.downpour import Downpour
from apps.strategies.easgd import Easgd
from apps.strategies.gem import Gem
from apps.strategies.local import Local
from apps.topology import Topology

STRATEGIES = {
    ("local", None): Local,
    ("allreduce", "horovod"): Horovod,
    ("allreduce", "ddp"): Ddp,
    ("downpour", None): Downpour,
    ("easgd", None): Easgd,
    ("gem", None): Gem,
}


def group_size(training: Training, topology: Topology) -> int:
    """How many ranks share each step."""
    ranks = topology.ranks
    return ranks.per_worker if training.strategy in CENTRAL else topology.num_trainers


def create(training: Training, experiment: Supervised, topology: Topology) -> Local:
    """Set up the strategy that the study names; collective."""
    backend = training.backend if training.strategy == "allreduce" else None
    strategy = STRATEGIES[training.strategy, backend]
    return strategy(experiment, topology, training)
