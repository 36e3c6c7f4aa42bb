"""Which choices of a study go together: strategy, its options, optimizer, precision and layout.

Each is a valid choice alone. Standard library only: the driver looks before anything runs, and each
rank looks again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from operator import attrgetter
from types import SimpleNamespace

from apps.contract import CENTRAL, Data, Layout, Training, plain, ranks_of, require

# All other optimizers work element by element.
NEED_WHOLE_LAYERS = frozenset({"muon", "adafactor", "soap", "shampoo", "scalableshampoo", "kron"})
SCALE_BY_LAYER = frozenset({"lars", "lamb"})
DRAW_RANDOM_NUMBERS = frozenset({"kron"})  # other ones on each rank

OWN_RATES = frozenset({"onecyclelr", "cycliclr"})  # schedulers that are told all learning rates

# Where an option is used: what chooses it, and the choices that use it.
STRATEGY, COMPRESSION = "training.strategy", "training.reduction.compression"
USED_BY: dict[str, tuple[str, tuple[str, ...]]] = {
    "training.backend": (STRATEGY, ("allreduce", *CENTRAL)),
    **{
        f"training.reduction.{name}": (STRATEGY, ("allreduce",))
        for name in ("compression", "operation", "hierarchical", "average_every")
    },
    "training.reduction.powersgd_rank": (COMPRESSION, ("powersgd",)),
    "training.reduction.powersgd_start_after": (COMPRESSION, ("powersgd",)),
    "training.reduction.topk_density": (COMPRESSION, ("topk",)),
    "training.reduction.topk_momentum": (COMPRESSION, ("topk",)),
    "training.split.schedule": (STRATEGY, ("pipeline",)),
    "training.split.micro_batches": (STRATEGY, ("pipeline",)),
    "training.split.stages": (STRATEGY, ("pipeline",)),
    "training.split.tensor": (STRATEGY, ("tensor", "pipeline")),
    "training.split.unit_parameters": (STRATEGY, ("sharded",)),
    "training.exchange.elastic_force": (STRATEGY, ("easgd",)),
    "training.exchange.kappa": (STRATEGY, ("gem",)),
    **{
        f"training.exchange.{name}": (STRATEGY, CENTRAL)
        for name in (
            *("synchronous", "backup_workers", "sync_every", "per", "staleness_lr"),
            *("pass_on_every", "transport", "overlap", "masters_wait", "gpu_aware"),
            "tolerate_worker_loss",
        )
    },
    "layout.num_masters": (STRATEGY, CENTRAL),
    "layout.sub_masters": (STRATEGY, CENTRAL),
}

Rule = tuple[str, str, bool]  # the key, what to say, and whether it is broken


def check_ranks(training: Training, layout: Layout) -> None:
    """See that all choices go together.

    Raises:
        ValueError: they do not; the text names the key and says what would work.
    """
    for optimizer in training.all_optimizers:
        with_one = dataclasses.replace(training, optimizer=optimizer, optimizers={})
        for key, message, is_broken in _rules(with_one, layout):
            require(not is_broken, f"{key}: {message}")


def check_collate(data: Data, training: Training, layout: Layout) -> None:
    """See that the model can be called with what `data.collate` gives.

    Raises:
        ValueError: it is divided, and then called with the inputs as they are.
    """
    if data.collate is None:
        return
    require(
        training.strategy not in ("tensor", "pipeline"),
        f"data.collate: '{training.strategy}' divides the model, and calls it with the inputs as "
        "they are; use 'allreduce' or 'sharded', or leave it out",
    )
    require(
        layout.gpus_per_rank <= 1,
        "data.collate: needs layout.gpus_per_rank of 0 or 1; for a model too large for one GPU use "
        "'sharded'",
    )


def check_used(training: Training, layout: Layout, searched: Collection[str]) -> None:
    """See that no option is set that does nothing.

    What chooses between options may be searched: there are trials then that use each of them.

    Args:
        searched: dotted paths of the values that a trial replaces.

    Raises:
        ValueError: an option is not at its default, and nothing reads it.
    """
    study = SimpleNamespace(training=training, layout=layout)
    default = SimpleNamespace(training=Training(), layout=Layout())
    for key, (chooser, choices) in USED_BY.items():
        value, chosen = attrgetter(key), attrgetter(chooser)(study)
        require(
            chooser in searched or chosen in choices or value(study) == value(default),
            f"{key}: '{chosen}' does not use it; leave it out (it is for {', '.join(choices)})",
        )


def _rules(training: Training, layout: Layout) -> Iterator[Rule]:
    yield from _of_precision(training, layout)
    yield from _of_the_model(training, layout)
    yield from _of_the_optimizer(training, layout)
    yield from _of_updates(training)
    if training.cuda_graphs:
        yield from _of_recording(training, layout)
    if training.strategy == "pipeline":
        yield from _of_the_stages(training, layout)
    if training.strategy == "allreduce":
        yield from _of_the_reduction(training, layout)
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
    strategy, ranks = training.strategy, ranks_of(training, layout)
    yield (
        "training.strategy",
        f"'local' trains on one rank, and the layout has {ranks.total}; use 'allreduce'",
        strategy == "local" and ranks.total > 1,
    )
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
    yield (
        "training.sync_batchnorm",
        f"the workers of '{strategy}' do not wait for each other; use 'allreduce' or 'sharded', or "
        "leave it out",
        training.sync_batchnorm and strategy in CENTRAL,
    )
    yield (
        "training.sync_batchnorm",
        "needs layout.gpus_per_rank of 0 or 1; take more ranks, or leave it out",
        training.sync_batchnorm and layout.gpus_per_rank > 1,
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


def _of_recording(training: Training, layout: Layout) -> Iterator[Rule]:
    key = "training.cuda_graphs"
    yield (
        key,
        f"is for 'local' with layout.gpus_per_rank = 1, not for '{training.strategy}' with "
        f"{layout.gpus_per_rank}; set it to false",
        training.strategy != "local" or layout.gpus_per_rank != 1,
    )
    for other, clashes in (
        ("compile", training.compile),
        ("recompute", len(training.recompute) > 0),
        ("accumulate", training.accumulate > 1),
        ("precision = 'fp16'", training.precision == "fp16"),
    ):
        yield key, f"does not go with training.{other}; set it to false, or change that", clashes


def _of_the_stages(training: Training, layout: Layout) -> Iterator[Rule]:
    """Of a pipeline."""
    split = training.split
    num_stages = layout.ranks_per_worker // layout.ranks_per_stage
    yield (
        "training.split.micro_batches",
        f"{split.micro_batches} are too few for the {num_stages} stages of schedule "
        f"'1f1b'; set it to at least {num_stages}, or use 'gpipe'",
        split.schedule == "1f1b" and split.micro_batches < num_stages,
    )
    yield (
        "training.split.micro_batches",
        f"{split.micro_batches} are more than the {training.batch_size} events of a batch; raise "
        "training.batch_size, or set it lower",
        split.micro_batches > training.batch_size,
    )
    yield (
        "training.split.stages",
        f"{len(split.stages)} names, but the ranks of a worker are {num_stages} stages; name the "
        "module that begins each stage after the first, or none",
        len(split.stages) > 0 and len(split.stages) != num_stages - 1,
    )
    yield (
        "training.split.tensor",
        "one rank a stage divides no layers; set layout.ranks_per_stage, or leave it out",
        len(split.tensor) > 0 and layout.ranks_per_stage == 1,
    )
    yield (
        "training.sync_batchnorm",
        "a pipeline normalises each micro-batch; use 'allreduce' or 'sharded', or leave it out",
        training.sync_batchnorm,
    )
    yield (
        "training.recompute",
        "a pipeline keeps activations of few micro-batches already; raise "
        "training.split.micro_batches, or use 'sharded'",
        len(training.recompute) > 0,
    )
    yield (
        "training.accumulate",
        "a pipeline accumulates over its micro-batches; raise training.batch_size and "
        "training.split.micro_batches",
        training.accumulate > 1,
    )


def _of_the_optimizer(training: Training, layout: Layout) -> Iterator[Rule]:
    strategy, optimizer = training.strategy, _name_of(training)
    divides = strategy == "tensor" or layout.ranks_per_stage > 1
    yield (
        "training.optimizer",
        f"'{optimizer}' needs whole layers, and '{strategy}' divides them; use 'allreduce', or "
        "another optimizer",
        (optimizer in NEED_WHOLE_LAYERS | {"lamb"} and (divides or strategy == "sharded"))
        or (optimizer in SCALE_BY_LAYER and divides),
    )
    yield (
        "training.optimizer",
        f"'{optimizer}' draws random numbers, other ones on each rank, so that the weights would "
        "part; train on one rank, or use 'soap'",
        optimizer in DRAW_RANDOM_NUMBERS
        and strategy not in CENTRAL
        and ranks_of(training, layout).total > 1,
    )
    yield (
        "training.optimizer",
        "pre_norm needs the norm of the whole gradient, and each stage of a pipeline has a part; "
        "leave it out, and set training.clip_norm",
        bool(training.optimizer.get("pre_norm")) and strategy == "pipeline",
    )


def _of_updates(training: Training) -> Iterator[Rule]:
    strategy = training.strategy
    yield (
        "training.accumulate",
        f"'{strategy}' has its own way; set training.exchange.sync_every",
        training.accumulate > 1 and strategy in CENTRAL,
    )
    yield (
        "training.schedule_per",
        f"'{strategy}' has no common count of updates; use 'epoch'",
        training.schedule_per == "update" and strategy in CENTRAL,
    )
    yield (
        "training.schedule_per",
        "there is no schedule; set training.scheduler, or leave it out",
        training.schedule_per == "update" and not training.phases,
    )
    several = len(training.phases) > 1
    for phase in training.phases:
        name, epochs = plain(phase["name"]), phase.get("epochs", 1)
        yield (
            "training.scheduler",
            f"'{phase['name']}' waits for the validation loss: it goes alone, and per epoch",
            name == "reducelronplateau" and (several or training.schedule_per == "update"),
        )
        yield (
            "training.scheduler",
            f"'{phase['name']}' cannot last epochs = {epochs!r}; it must be a whole number, at "
            "least 1",
            type(epochs) is not int or epochs < 1,
        )
        yield (
            "training.scheduler",
            f"'{phase['name']}' changes what the others begin from, and has a warm-up of its own: "
            "it goes alone",
            name == "onecyclelr" and several,
        )
        yield (
            "training.lr_scaling",
            f"'{phase['name']}' has learning rates of its own, which are not scaled; scale its "
            "max_lr by hand, and set it to 'none'",
            name in OWN_RATES and training.lr_scaling != "none",
        )


def _of_the_reduction(training: Training, layout: Layout) -> Iterator[Rule]:
    reduction, backend, ranks = training.reduction, training.backend, ranks_of(training, layout)
    compression = reduction.compression
    yield (
        "training.reduction.compression",
        f"Horovod sends 'none' or 'fp16', not '{compression}'; set training.backend = 'ddp'",
        compression not in ("none", "fp16") and backend == "horovod",
    )
    yield (
        "training.reduction.compression",
        "workers of one rank that average their weights (average_every) send no gradients; set "
        "layout.ranks_per_worker, or leave it out",
        compression != "none" and reduction.average_every > 1 and ranks.per_worker == 1,
    )
    yield (
        "training.reduction.topk_momentum",
        "is the momentum of plain SGD, before gradients are sent; set training.optimizer to "
        "{ name = 'sgd' } without momentum, and no clip_norm",
        reduction.topk_momentum > 0
        and (
            plain(training.optimizer["name"]) != "sgd"
            or bool(training.optimizer.get("momentum"))
            or training.clip_norm is not None
        ),
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
    yield (
        "training.reduction.average_every",
        "needs layout.gpus_per_rank of 0 or 1: weights are averaged in one piece",
        reduction.average_every > 1 and layout.gpus_per_rank > 1,
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
    return plain(training.optimizer["name"])
