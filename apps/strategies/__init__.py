"""How the ranks of a task share one training. A new strategy is a class and a line here."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from apps.contract import CENTRAL, Training, averages_weights

if TYPE_CHECKING:
    from apps.data import Preview
    from apps.experiment import Experiment
    from apps.strategies.base import Strategy
    from apps.topology import Topology

# Imported when it is used: the check before a run needs some modules of this package, without MPI.
STRATEGIES = {
    ("local", None): "local:Local",
    ("local", "recorded"): "recorded:Recorded",
    ("allreduce", "horovod"): "allreduce:Horovod",
    ("allreduce", "ddp"): "allreduce:Ddp",
    ("sharded", None): "sharded:Sharded",
    ("tensor", None): "tensor:Tensor",
    ("pipeline", None): "pipeline:Pipeline",
    ("downpour", None): "downpour:Downpour",
    ("easgd", None): "easgd:Easgd",
    ("gem", None): "gem:Gem",
}


def group_size(training: Training, topology: Topology) -> int:
    """How many of those that read batches of their own share each step."""
    ranks = topology.ranks
    apart = training.strategy in CENTRAL or averages_weights(training)
    return ranks.per_worker if apart else ranks.readers


def create(
    training: Training,
    experiment: Experiment,
    topology: Topology,
    preview: Preview,
) -> Strategy:
    """Set up the strategy that the study names; collective."""
    backend = training.backend if training.strategy == "allreduce" else None
    if training.cuda_graphs:
        backend = "recorded"
    module, _, name = STRATEGIES[training.strategy, backend].partition(":")
    strategy = getattr(importlib.import_module(f"apps.strategies.{module}"), name)
    return strategy(experiment, topology, training, preview)
