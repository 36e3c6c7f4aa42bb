"""Which choices of a study go together: strategy, its options, optimizer, precision and layout.

Each is a valid choice alone. Standard library only: the driver looks before anything runs, and each
rank looks again.
"""

from __future__ import annotations

from collections.abc import Iterator

from apps.contract import CENTRAL, Layout, Ranks, Training, ranks_of, require

# All other optimizers work element by element.
NEED_WHOLE_LAYERS = frozenset({"muon", "adafactor", "soap", "shampoo", "scalableshampoo", "kron"})
SCALE_BY_LAYER = frozenset({"lars", "lamb"})

Rule = tuple[str, str, bool]  # the key, what to say, and whether it is broken


def check_ranks(training: Training, layout: Layout) -> None:
    """See that all choices go together.

    Raises:
        ValueError: they do not; the text names the key and says what would work.
    """
    for key, message, is_broken in _rules(training, layout):
        require(not is_broken, f"{key}: {message}")


def _rules(training: Training, layout: Layout) -> Iterator[Rule]:
    yield from _of_precision(training, layout)
    yield from _of_the_model(training, layout)
    yield from _of_updates(training)
    if training.strategy == "allreduce":
        yield from _of_the_reduction(training, ranks_of(training, layout))
    if training.strategy in CENTRAL:
        yield from _of_the_exchange(training, layout)


def _of_precision(training: Training, layout: Layout) -> Iterator[Rule]:
    strategy, precision = training.strategy, training.precision
    yield (
        "training.precision",
        f"'{precision}' is arithmetic of GPUs, and layout.gpus_per_rank = 0; on a CPU use 'bf16' "
        "or 'fp32'",
        precision in ("fp16", "tf32") and layout.gpus_per_rank == 0,
    )
    yield (
        "training.precision",
        f"'fp16' needs its loss scaled, which '{strategy}' does not do; use 'bf16'",
        precision == "fp16" and strategy not in ("local", "allreduce", "sharded"),
    )


def _of_the_model(training: Training, layout: Layout) -> Iterator[Rule]:
    strategy = training.strategy
    divides = strategy == "tensor" or layout.ranks_per_stage > 1
    yield (
        "layout.ranks_per_stage",
        f"'{strategy}' has no stages; leave it out, or set training.strategy = 'pipeline'",
        layout.ranks_per_stage > 1 and strategy != "pipeline",
    )
    yield (
        "layout.gpus_per_rank",
        f"'{strategy}' uses one GPU a rank; set it to 1 and take more ranks (several are of "
        "'local' and 'allreduce', which then divide the layers between them)",
        layout.gpus_per_rank > 1 and strategy not in ("local", "allreduce"),
    )
    num_stages = layout.ranks_per_worker // layout.ranks_per_stage
    yield (
        "training.split.micro_batches",
        f"{training.split.micro_batches} are too few for the {num_stages} stages of schedule "
        f"'1f1b'; set it to at least {num_stages}, or use 'gpipe'",
        strategy == "pipeline"
        and training.split.schedule == "1f1b"
        and training.split.micro_batches < num_stages,
    )
    yield (
        "training.sync_batchnorm",
        "a pipeline normalises each micro-batch; use 'allreduce' or 'sharded', or leave it out",
        training.sync_batchnorm and strategy == "pipeline",
    )
    yield (
        "training.sync_batchnorm",
        f"the workers of '{strategy}' do not wait for each other; use 'allreduce' or 'sharded', or "
        "leave it out",
        training.sync_batchnorm and strategy in CENTRAL,
    )
    yield (
        "training.recompute",
        "a pipeline keeps activations of few micro-batches already; raise "
        "training.split.micro_batches, or use 'sharded'",
        len(training.recompute) > 0 and strategy == "pipeline",
    )
    yield (
        "training.recompute",
        "needs layout.gpus_per_rank of 0 or 1; for a model too large for one GPU use 'sharded'",
        len(training.recompute) > 0 and layout.gpus_per_rank > 1,
    )
    yield (
        "training.compile",
        f"is for 'local', 'allreduce' and 'sharded' with one GPU a rank, not for '{strategy}' with "
        f"layout.gpus_per_rank = {layout.gpus_per_rank}; set it to false",
        training.compile
        and (strategy not in ("local", "allreduce", "sharded") or layout.gpus_per_rank > 1),
    )
    optimizer = _name_of(training)
    yield (
        "training.optimizer",
        f"'{optimizer}' needs whole layers, and '{strategy}' divides them; use 'allreduce', or "
        "another optimizer",
        (optimizer in NEED_WHOLE_LAYERS | {"lamb"} and (divides or strategy == "sharded"))
        or (optimizer in SCALE_BY_LAYER and divides),
    )


def _of_updates(training: Training) -> Iterator[Rule]:
    strategy = training.strategy
    yield (
        "training.accumulate",
        f"'{strategy}' has its own way; set training.exchange.sync_every",
        training.accumulate > 1 and strategy in CENTRAL,
    )
    yield (
        "training.accumulate",
        "a pipeline accumulates over its micro-batches; raise training.batch_size and "
        "training.split.micro_batches",
        training.accumulate > 1 and strategy == "pipeline",
    )
    yield (
        "training.schedule_per",
        f"'{strategy}' has no common count of updates; use 'epoch'",
        training.schedule_per == "update" and strategy in CENTRAL,
    )
    several = len(training.phases) > 1
    for phase in training.phases:
        plateau = _plain(phase["name"]) == "reducelronplateau"
        yield (
            "training.scheduler",
            f"'{phase['name']}' waits for the validation loss: it goes alone, and per epoch",
            plateau and (several or training.schedule_per == "update"),
        )


def _of_the_reduction(training: Training, ranks: Ranks) -> Iterator[Rule]:
    reduction, backend = training.reduction, training.backend
    compression = reduction.compression
    yield (
        "training.reduction.compression",
        f"Horovod sends 'none' or 'fp16', not '{compression}'; set training.backend = 'ddp'",
        compression not in ("none", "fp16") and backend == "horovod",
    )
    yield (
        "training.precision",
        f"'fp16' scales gradients, and '{compression}' keeps what it did not send in the old "
        "scale; use 'bf16', or compression = 'fp16'",
        training.precision == "fp16" and compression in ("powersgd", "topk"),
    )
    yield (
        "training.reduction.hierarchical",
        "needs training.backend = 'ddp'",
        reduction.hierarchical and backend == "horovod",
    )
    yield (
        "training.reduction.hierarchical",
        f"sends whole gradients, not '{compression}'; choose none, fp16 or bf16",
        reduction.hierarchical and compression in ("powersgd", "topk"),
    )
    yield (
        "training.reduction.hierarchical",
        "workers that average their weights (average_every) do not average gradients; choose one",
        reduction.hierarchical and reduction.average_every > 1,
    )
    adasum = reduction.operation == "adasum"
    yield (
        "training.reduction.operation",
        "'adasum' is Horovod's; set training.backend = 'horovod'",
        adasum and backend != "horovod",
    )
    yield (
        "training.reduction.operation",
        f"'adasum' pairs ranks, and {ranks.total} is not a power of 2; use 'average'",
        adasum and ranks.total & (ranks.total - 1) != 0,
    )
    yield (
        "training.reduction.operation",
        "'adasum' is over all ranks at each update; set average_every = 1",
        adasum and reduction.average_every > 1,
    )


def _of_the_exchange(training: Training, layout: Layout) -> Iterator[Rule]:
    """Of the strategies with a central copy of the weights."""
    exchange, strategy = training.exchange, training.strategy
    settings = training.optimizer
    optimizer = _name_of(training)
    extra = set(settings) - {"name", "lr"}
    parts = layout.num_masters > 1 or len(layout.sub_masters) > 0

    yield (
        "training.optimizer",
        f"'{optimizer}' needs whole layers, and {strategy} takes the weights in pieces; choose "
        "another",
        optimizer in NEED_WHOLE_LAYERS | SCALE_BY_LAYER,
    )
    yield (
        "training.optimizer",
        "gem matches the energy of sgd with momentum; set it to { name = 'sgd', lr = 0.05, "
        "momentum = 0.9 }",
        strategy == "gem" and (optimizer != "sgd" or not extra <= {"momentum"}),
    )
    yield (
        "training.optimizer",
        "the momentum variant of easgd (sgd with nesterov) knows lr and momentum alone",
        strategy == "easgd"
        and optimizer == "sgd"
        and bool(settings.get("nesterov"))
        and not extra <= {"momentum", "nesterov"},
    )
    yield (
        "training.exchange.transport",
        "'one_sided' MPI can only add, so that downpour's optimizer must be plain sgd; use "
        "'messages'",
        exchange.transport == "one_sided"
        and strategy == "downpour"
        and (optimizer != "sgd" or len(extra) > 0),
    )
    yield (
        "training.exchange.transport",
        f"'{exchange.transport}' needs one whole copy of the weights; set layout.num_masters = 1 "
        "and leave out layout.sub_masters",
        exchange.transport != "messages" and parts,
    )
    yield (
        "training.exchange.tolerate_worker_loss",
        "needs layout.ranks_per_worker = 1: ranks that share a batch cannot go on without one of "
        "them",
        exchange.tolerate_worker_loss and layout.ranks_per_worker > 1,
    )
    yield (
        "training.exchange.backup_workers",
        "several masters would wait for different workers; set layout.num_masters = 1",
        exchange.backup_workers > 0 and layout.num_masters > 1,
    )
    yield (
        "training.exchange.backup_workers",
        f"{exchange.backup_workers} is not below layout.num_workers = {layout.num_workers}",
        exchange.backup_workers >= layout.num_workers,
    )
    yield (
        "training.exchange.pass_on_every",
        "only asynchronous sub-masters pass on; leave it out, or set layout.sub_masters",
        exchange.pass_on_every is not None and (exchange.synchronous or not layout.sub_masters),
    )
    yield (
        "training.exchange.gpu_aware",
        "there is no GPU; set layout.gpus_per_rank, or leave it out",
        exchange.gpu_aware and layout.gpus_per_rank == 0,
    )
    only = {
        "backup_workers": ("downpour", exchange.backup_workers > 0),
        "staleness_lr": ("downpour", exchange.staleness_lr),
        "synchronous": ("downpour, easgd", exchange.synchronous),
        "overlap": ("downpour, easgd", exchange.overlap),
        "sync_every": ("downpour, easgd", exchange.sync_every > 1),
    }
    for name, (strategies, is_set) in only.items():
        message = f"{strategy} does not use it; leave it out (it is for {strategies})"
        yield f"training.exchange.{name}", message, is_set and strategy not in strategies


def _name_of(training: Training) -> str:
    return _plain(training.optimizer["name"])


def _plain(name: str) -> str:
    return name.replace("_", "").lower()
