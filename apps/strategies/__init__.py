"""How the ranks of a task share one training. A new strategy is a class and a line here."""

from __future__ import annotations

from apps.contract import Training
from apps.experiment import Supervised
from apps.strategies.allreduce import Ddp, Horovod
from apps.strategies.local import Local
from apps.topology import Topology

STRATEGIES = {
    ("local", None): Local,
    ("allreduce", "horovod"): Horovod,
    ("allreduce", "ddp"): Ddp,
}


def create(training: Training, experiment: Supervised, topology: Topology) -> Local:
    """Set up the strategy that the study names; collective."""
    backend = None if training.strategy == "local" else training.backend
    strategy = STRATEGIES[training.strategy, backend]
    return strategy(experiment, topology, training.clip_norm)
