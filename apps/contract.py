"""What passes between the driver and the MPI ranks: the task, its result, and their files.

Standard library only. The driver (`workflow`) and the ranks (`apps`) share nothing else. The
sections of a study are declared here once; `workflow/study.py` has pydantic check a user's TOML
against these very classes, and `apps.train` reads them back from `task.json`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import math
import operator
import os
import re
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

VERSION = "0.1.0"

OWN_LOSS = "own"

T = TypeVar("T")

Plain = Any  # bool, int, float, str, or lists and dicts of them: what TOML and JSON can both hold

# How the names of metrics end of which more is better, and of which less is.
MAXIMISED = (
    *("accuracy", "auroc", "auc", "average_precision", "precision", "recall", "specificity"),
    *("sensitivity", "f1", "f1_score", "f_beta_score", "jaccard_index"),
    *("r2", "r2_score", "explained_variance", "cohen_kappa", "matthews_corr_coef", "exact_match"),
    *("negative_predictive_value", "cosine_similarity"),
)
MINIMISED = (
    *("loss", "error", "mse", "mae", "rmse", "mape", "distance", "divergence", "perplexity"),
    *("chi2", "deviance_score"),
)


class N3LOError(Exception):
    """Something that the user can mend. One line: what, where, the value, the way out."""

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows of it: the line, and no traceback."""
        return [f"n3lo: {self}"]


@dataclass(frozen=True, kw_only=True)
class Range:
    """The numbers that a key may be, from one end to the other; None = any."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    def __contains__(self, value: float) -> bool:
        return (
            (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        ends = {name: end for name, end in vars(self).items() if end is not None}
        return " and ".join(f"{name.replace('_', ' ')} {end}" for name, end in ends.items())


Count = Annotated[int, Range(at_least=1)]
OptionalCount = Annotated[int | None, Range(at_least=1)]
Natural = Annotated[int, Range(at_least=0)]
Positive = Annotated[float, Range(above=0)]
OptionalPositive = Annotated[float | None, Range(above=0)]
Share = Annotated[float, Range(above=0, at_most=1)]


class Section:
    """Shared by the sections of a study: keyword-only, frozen, unknown keys are errors.

    A field's `Range` is checked, and is in the schema and the reference; so is what is at "schema"
    in its metadata, as keywords of a JSON schema, which the section checks by itself.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        for name, allowed in ranges(type(self)).items():  # type: ignore[arg-type]  # hashable
            value = getattr(self, name)
            require(value is None or value in allowed, f"{name}: {value} is not {allowed}")


@functools.cache
def ranges(section: type) -> dict[str, Range]:
    """Those of the fields of a section that have one."""
    hints = get_type_hints(section, include_extras=True)
    return {
        name: each
        for name, hint in hints.items()
        for each in getattr(hint, "__metadata__", ())
        if isinstance(each, Range)
    }


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def is_source(text: str) -> bool:
    """Whether it is of the form "package.module:Name" or "file.py:Name"."""
    return text.count(":") == 1 and all(text.split(":"))


def plain(name: str) -> str:
    """The name of an optimizer or a scheduler as torch has it, in small letters: exponentiallr."""
    return name.replace("_", "").lower()


def optimizer_of(
    common: dict[str, Plain], own: Mapping[str, dict[str, Plain]], network: str
) -> dict[str, Plain]:
    """See `Training.optimizer_of`."""
    settings = own.get(network, {})
    return settings if "name" in settings else {**common, **settings}


Goal = Literal["min", "max"]


def goal_of(metric: str) -> Goal | None:
    """Whether less or more of `metric` is better, by how its name ends; None if that is unknown."""
    for goal, ends in GOALS.items():
        if any(metric == end or metric.endswith(f"_{end}") for end in ends):
            return goal
    return None


GOALS: dict[Goal, tuple[str, ...]] = {"max": MAXIMISED, "min": MINIMISED}


# -- losses and metrics, as a study names them -----------------------------------------------------

RESERVED = ("loss", "epoch", "lr", "seconds", "updates", "staleness")  # in a row of the history


def check_loss(loss: Plain) -> None:
    """See that a loss, or a list or table of losses, has the right form.

    Raises:
        ValueError: it has not; the text begins with the key.
    """
    if isinstance(loss, list) or (isinstance(loss, dict) and "name" not in loss):
        several = loss if isinstance(loss, list) else list(loss.values())
        require(len(several) > 0, "loss: name at least one")
        for each in several:
            is_one = isinstance(each, str) or (isinstance(each, dict) and "name" in each)
            require(is_one, f"loss: {each!r} is no loss; give a name, or a table with a name")
            check_loss(each)
        return
    name = loss["name"] if isinstance(loss, dict) else loss
    require(
        isinstance(name, str) and (":" not in name or is_source(name)),
        f"loss: {name!r} is no loss; as in 'mse', 'file.py:name' or "
        "{ name = 'huber_loss', delta = 0.5 }",
    )


def check_metrics(metrics: list[str | dict[str, Plain]]) -> None:
    """See that all metrics have the right form, and names of their own.

    Raises:
        ValueError: they have not; the text begins with the key.
    """
    names: list[str] = []
    for metric in metrics:
        source = metric.get("name") if isinstance(metric, dict) else metric
        require(
            isinstance(source, str) and (":" not in source or is_source(source)),
            f"metrics: {source!r} is no metric; as in 'accuracy', 'file.py:name' or "
            "{ name = 'torchmetrics:MulticlassAUROC', num_classes = 5, thresholds = 100 }",
        )
        name = metric_name(metric)
        allowed = re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name)
        require(
            allowed is not None and name not in RESERVED and not name.startswith("val_"),
            f"metrics: '{name}' cannot name one; set as = to letters, digits and '_', without "
            f"val_ in front, and none of {', '.join(RESERVED)}",
        )
        twice = f"metrics: '{name}' is there twice; set as = to give one of them another name"
        require(name not in names, twice)
        names.append(name)


def metric_name(metric: str | dict[str, Plain]) -> str:
    """What a metric is called in the ledger: `as`, or its own name in small letters.

    "torchmetrics:MulticlassAUROC" is multiclass_auroc.
    """
    if isinstance(metric, dict) and "as" in metric:
        return str(metric["as"])
    own = str(metric["name"] if isinstance(metric, dict) else metric).rpartition(":")[2]
    return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Za-z0-9])(?=[A-Z][a-z])", "_", own).lower()


def sources_of(value: Plain) -> list[str]:
    """What a loss or a metric, or lists and tables of them, are made from: "file.py:name"."""
    found: list[str] = []
    with_sources(value, lambda text: found.append(text) or text)  # type: ignore[func-returns-value]
    return found


def with_sources(value: Plain, change: Callable[[str], str]) -> Plain:
    """A loss or a metric, or lists and tables of them, with each source changed."""
    if isinstance(value, str):
        return change(value) if is_source(value) else value
    if isinstance(value, list):
        return [with_sources(each, change) for each in value]
    if isinstance(value, dict) and "name" in value:  # the other values are its arguments
        return {**value, "name": with_sources(value["name"], change)}
    if isinstance(value, dict):
        return {name: with_sources(each, change) for name, each in value.items()}
    return value


def package_of(path: Path) -> tuple[Path, str]:
    """The folder from which a file of Python is imported, and its name there.

    Of /a/mine/net.py it is ("/a", "mine.net") where /a/mine has an __init__.py, and otherwise
    ("/a/mine", "net").
    """
    parts: list[str] = []
    folder = path.parent
    while (folder / "__init__.py").is_file() and folder.name.isidentifier():
        parts.insert(0, folder.name)
        folder = folder.parent
    if path.stem != "__init__" or not parts:
        parts.append(path.stem)
    return folder, ".".join(parts)


def without_folder(source: str) -> str:
    """Of "/a/b/file.py:Name" what is the same wherever the file lies."""
    return source.rpartition("/")[2]


def is_better(value: float, than: float | None, goal: str, min_delta: float = 0.0) -> bool:
    """Whether `value` beats `than` by more than `min_delta`; anything beats None."""
    if than is None:
        return True
    return value > than + min_delta if goal == "max" else value < than - min_delta


Steps = list[str | dict[str, Plain]]  # "log1p", { name = "scale", by = 0.01 }

FILE = "@file"  # the field that is the number of an event's file: no array is called so

# The steps that data.transforms may name: the arguments that each needs, and those that it may
# have. What they do: `apps.transforms`.
TRANSFORMS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "normalise": ((), ("per", "ignore")),
    "min_max": ((), ("per", "ignore")),
    "log": (("floor",), ()),
    "log1p": ((), ()),
    "clip": ((), ("low", "high")),
    "scale": ((), ("by", "offset")),
    "threshold": (("below",), ()),
    "replace": (("by",), ("value",)),
    "crop": ((), ("to", "first", "axes")),
    "pad": (("to",), ("axes", "value")),
    "channel_axis": ((), ("at",)),
    "transpose": (("axes",), ()),
    "flatten": ((), ()),
    "one_hot": (("classes",), ()),
    "class_number": ((), ()),
}


def check_transforms(transforms: Mapping[str, Steps]) -> None:
    """See that all steps and their arguments exist; `apps.transforms` looks at the values.

    Raises:
        ValueError: they do not; the text names the field and says what there is.
    """
    for name, steps in transforms.items():
        for step in steps:
            settings = {"name": step} if isinstance(step, str) else step
            where, chosen = f"transforms.{name}", settings.get("name")
            known = isinstance(chosen, str) and chosen in TRANSFORMS
            require(
                known, f"{where}: there is no step {chosen!r}, only {', '.join(sorted(TRANSFORMS))}"
            )
            needed, optional = TRANSFORMS[str(chosen)]
            takes = f"it takes {', '.join(needed + optional) or 'no arguments'}"
            for key, value in settings.items():
                is_known = key in ("name", *needed, *optional)
                require(is_known, f"{where}: '{chosen}' has no '{key}'; {takes}")
                values = value if isinstance(value, list) else [value]
                is_finite = all(math.isfinite(each) for each in values if isinstance(each, float))
                require(is_finite, f"{where}: '{chosen}': {key} = {value} is not finite")
            for key in needed:
                require(key in settings, f"{where}: '{chosen}' needs {key}; {takes}")


@dataclass(frozen=True, kw_only=True)
class Model(Section):
    """`source` is "package.module:Name" or "file.py:Name"; `args` are its keyword arguments."""

    source: str  # "my_model.py:Tagger", beside the study, or "package.module:Name"
    args: dict[str, Plain] = field(default_factory=dict)  # keyword arguments of what it names
    files: list[str] = field(
        default_factory=list
    )  # that its code reads; patterns, beside the study

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            is_source(self.source),
            f"'{self.source}' is not of the form 'package.module:Name' or 'file.py:Name'",
        )


@dataclass(frozen=True, kw_only=True)
class Data(Section):
    """Files of events and what to take from them: HDF5, NumPy, Parquet or ROOT, by their suffix.

    Fields are named "group/dataset" or "dataset[:, -6:-1]" (the first axis is the event), where a
    dataset is also a column, or a branch as "tree/branch" or "branch"; "(pt, eta, phi)" and
    "feature_*" are several of one shape, stacked along a new last axis. A list gives several
    fields, passed to the model in that order; a group or a table {name = field} gives them to the
    model as keyword arguments.
    """

    files: list[str] = field(
        metadata={"schema": {"minItems": 1}}
    )  # paths or patterns, absolute or relative to the study; or URLs
    inputs: str | list[str] | dict[str, str]  # what the model is called with
    targets: str | list[str] | dict[str, str]  # what the loss compares the model's outputs with
    file_numbers: list[float] | None = None  # of each of files: the field "@file"; None = 0, 1, ...
    weights: str | None = None  # one number an event, of any sign, in loss and metrics; None = 1
    folds: Count = 1  # N_F; 1 = no cross-validation, one split by validation_fraction
    fold_by: Literal["events", "files"] = "events"  # what is dealt out to folds whole
    validation_fraction: Annotated[float, Range(above=0, at_most=0.5)] = (
        0.2  # of the events, where folds = 1
    )
    stratify: bool | None = None  # equal class shares in each fold; None = if targets are classes
    train_fraction: Share = 1.0  # of each fold's training events, always the same first ones
    shuffle: bool = True  # the training events, anew for each epoch
    block_events: OptionalCount = None  # events read at once; None = those of a chunk, at least 64
    memory_gb: Annotated[float | None, Range(at_least=0)] = (
        None  # per rank, 0 = read ahead; None = a quarter of the free
    )
    cache: str | None = None  # copy the files there once a node, "$TMPDIR"; None = $DATA_CACHE
    copy_command: str | None = None  # "xrdcp {} {}"; None = $DATA_COPY_COMMAND, or a plain copy
    # By field, steps in order: "log1p", { name = "scale", by = 0.01 }; docs/data.md has them all.
    transforms: dict[str, Steps] = field(default_factory=dict)
    reader: str | None = None  # "file.py:function" of a path -> arrays by name; None = by suffix
    collate: str | None = None  # "file.py:function" of a batch's inputs -> what the model gets

    def __post_init__(self) -> None:
        super().__post_init__()
        require(len(self.files) > 0, "files: name at least one file")
        check_transforms(self.transforms)
        for name, source in (("reader", self.reader), ("collate", self.collate)):
            require(
                source is None or is_source(source),
                f"{name}: '{source}' is not of the form 'package.module:function' or "
                "'file.py:function'",
            )


@dataclass(frozen=True, kw_only=True)
class EarlyStopping(Section):
    """Stop once `metric` has not improved by more than `min_delta` for `patience` epochs."""

    metric: str = "val_loss"  # what is watched
    patience: Count = 5  # epochs in a row without an improvement
    min_delta: Annotated[float, Range(at_least=0)] = (
        0.0  # what an improvement must exceed, in units of the metric
    )
    goal: Goal | None = None  # what is better; None = as its name says, where it does


@dataclass(frozen=True, kw_only=True)
class Target(Section):
    """Stop once `metric` is as good as `value`."""

    metric: str  # what is watched
    value: float  # at which the training ends, in units of the metric
    goal: Goal | None = None  # what is better; None = as its name says, where it does


@dataclass(frozen=True, kw_only=True)
class Exchange(Section):
    """How workers and masters exchange; of the strategies with a central copy of the weights."""

    synchronous: bool = False  # masters wait for all their workers; not of gem
    backup_workers: Natural = 0  # of synchronous downpour: so many updates are not waited for
    sync_every: Count = 1  # tau, batches between two exchanges; of downpour and easgd
    per: Literal["update", "batch"] = "update"  # where a batch gives several updates, as of a GAN
    staleness_lr: bool = False  # downpour: divide the learning rate of an update by its staleness
    # beta of easgd; alpha = beta / workers of the master; above 1 it overshoots (Zhang et al. 2015)
    elastic_force: Share = 0.9
    kappa: Positive = 1.0  # of gem: the energy of a worker, in units of its momentum's
    pass_on_every: OptionalCount = (
        None  # exchanges of a sub-master between its own; None = children
    )
    # How weights travel: MPI messages, memory that ranks share, or one-sided MPI.
    transport: Literal["messages", "window", "one_sided"] = "messages"
    overlap: bool = False  # exchange while the next gradient is computed; not of gem
    masters_wait: Literal["auto", "sleep", "spin"] = "auto"  # auto: sleep where cores are shared
    gpu_aware: bool = False  # hand GPU memory to MPI; else it passes through pinned memory
    tolerate_worker_loss: bool = False  # the others go on when a worker dies while it trains

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.backup_workers == 0 or self.synchronous,
            "backup_workers: asynchronous masters wait for nobody; set synchronous = true",
        )
        messages = self.transport == "messages"
        for name, asked in (
            ("synchronous", self.synchronous),
            ("gpu_aware", self.gpu_aware),
            ("tolerate_worker_loss", self.tolerate_worker_loss),
        ):
            require(messages or not asked, f"{name}: needs transport = 'messages'")
        for name, asked in (
            ("staleness_lr", self.staleness_lr),
            ("overlap", self.overlap),
            ("tolerate_worker_loss", self.tolerate_worker_loss),
        ):
            require(not (self.synchronous and asked), f"{name}: needs synchronous = false")


@dataclass(frozen=True, kw_only=True)
class Reduction(Section):
    """How the ranks of `allreduce` average their gradients."""

    compression: Literal["none", "fp16", "bf16", "powersgd", "topk"] = "none"  # of gradients
    powersgd_rank: Count = 2  # of the two factors that stand for a layer's gradient
    powersgd_start_after: Natural = 0  # updates by whole gradients before it begins
    topk_density: Share = 0.01  # share of a layer's gradient that is sent in a step
    topk_momentum: Annotated[float, Range(at_least=0, below=1)] = (
        0.0  # of what is kept and sent, in place of the optimizer's own
    )
    operation: Literal["average", "adasum"] = "average"  # by which gradients become one
    hierarchical: bool = False  # within each worker first, then across workers
    average_every: Count = 1  # local SGD: workers average their weights every so many updates


@dataclass(frozen=True, kw_only=True)
class Split(Section):
    """How `pipeline`, `tensor` and `sharded` divide a model over the ranks of a worker."""

    schedule: Literal["1f1b", "gpipe"] = "1f1b"  # of pipeline
    micro_batches: Count = 4  # of pipeline: parts of a batch that follow each other
    stages: list[str] = field(default_factory=list)  # layers that begin one; [] = by measured cost
    tensor: dict[str, str] = field(default_factory=dict)  # {"phi.*" = "column"}; {} = found out
    unit_parameters: Count = 1_000_000  # of sharded: layers of at least so many are fetched alone


Schedule = dict[str, Plain]


@dataclass(frozen=True, kw_only=True)
class Training(Section):
    """How one task trains."""

    # How the ranks of a task share one training.
    strategy: Literal[
        "local", "allreduce", "sharded", "tensor", "pipeline", "downpour", "easgd", "gem"
    ] = "local"
    backend: Literal["horovod", "ddp"] = "horovod"  # of allreduce, also within a worker's ranks
    reduction: Reduction = field(default_factory=Reduction)  # of allreduce
    exchange: Exchange = field(default_factory=Exchange)  # of downpour, easgd and gem
    split: Split = field(default_factory=Split)  # of pipeline, tensor and sharded
    epochs: Count = 10  # passes over the training events, at most
    batch_size: Count = 32  # per rank, or per worker where its ranks divide the model
    accumulate: Count = 1  # batches of each rank that make one update
    # A name of torch.nn.functional, "file.py:name", or { name = "huber_loss", delta = 0.5 }; a list
    # or table of these for several targets. OWN_LOSS: the model brings its losses and metrics.
    loss: str | list[Plain] | dict[str, Plain] = "cross_entropy"
    loss_weights: list[float] | dict[str, float] | None = None  # of several targets; None = 1 each
    # Measured each epoch, beside the loss: "accuracy", "mse", "mae", "file.py:name",
    # "torchmetrics:R2Score", or { name = "torchmetrics:MulticlassF1Score", num_classes = 5 }.
    metrics: list[str | dict[str, Plain]] = field(default_factory=list)
    # A class of torch.optim, or a large-batch one such as "lars", and its arguments.
    optimizer: dict[str, Plain] = field(
        default_factory=lambda: {"name": "adam", "lr": 1e-3},
        metadata={"schema": {"required": ["name"]}},
    )
    optimizers: dict[str, dict[str, Plain]] = field(default_factory=dict)  # of some of a GAN's
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"  # of lr, by the batches of an update
    scheduler: Schedule | list[Schedule] | None = None  # { name = "exponential_lr", gamma = 0.9 }
    schedule_per: Literal["epoch", "update"] = "epoch"  # what its numbers count
    clip_norm: OptionalPositive = None  # largest L2 norm of the whole gradient
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"  # of the arithmetic; weights: fp32
    sync_batchnorm: bool = False  # statistics of the whole batch, and not of each rank's part
    recompute: list[str] = field(default_factory=list)  # layers that keep no activations: ["*"]
    compile: bool = False  # by torch.compile
    cuda_graphs: bool = False  # record what a GPU is asked for in a step, and ask at once
    early_stopping: EarlyStopping | None = None  # None = all epochs
    target: Target | None = None  # None = however good it is
    max_minutes: OptionalPositive = None  # of training; ends after the epoch that passes it
    select: Literal["best", "last"] = "best"  # the epoch whose weights and fom are kept
    # read as by so many ranks of batch_size; None = those there are
    lanes: OptionalCount = None
    tensorboard: bool = False  # write each epoch for TensorBoard too, in the task's folder

    def __post_init__(self) -> None:
        super().__post_init__()
        check_loss(self.loss)
        require(
            self.loss_weights is None or self.loss != OWN_LOSS,
            "loss_weights: with loss = 'own' the model weighs its losses; leave it out",
        )
        check_metrics(self.metrics)
        phases = self.phases
        for key, table, example in (
            ("optimizer", self.optimizer, "{ name = 'adam' }"),
            *(("scheduler", each, "{ name = 'exponential_lr', gamma = 0.9 }") for each in phases),
        ):
            named = isinstance(table.get("name"), str)
            require(named, f"{key}: needs a name, as in {example}")
        for phase in phases[:-1]:
            epochs = phase.get("epochs")
            require(
                isinstance(epochs, int) and epochs >= 1,
                f"scheduler: '{phase['name']}' is followed by another and needs its length, as in "
                f"epochs = 5",
            )
        require(
            self.lr_scaling == "none"
            or all(isinstance(each.get("lr"), float | int) for each in self.all_optimizers),
            "lr_scaling: scales the learning rate of one rank; give it as optimizer.lr",
        )

    def optimizer_of(self, network: str) -> dict[str, Plain]:
        """Of one of several networks: its own, or what it changes of the common one."""
        return optimizer_of(self.optimizer, self.optimizers, network)

    @property
    def all_optimizers(self) -> list[dict[str, Plain]]:
        """The common one, and those of networks that have their own."""
        return [self.optimizer, *map(self.optimizer_of, self.optimizers)]

    def with_rates(self, factor: float) -> Training:
        """The same with all learning rates multiplied."""
        own = {
            network: {**settings, "lr": settings["lr"] * factor} if "lr" in settings else settings
            for network, settings in self.optimizers.items()
        }
        common = {**self.optimizer, "lr": self.optimizer["lr"] * factor}
        return dataclasses.replace(self, optimizer=common, optimizers=own)

    @property
    def phases(self) -> list[Schedule]:
        """The schedulers that follow each other."""
        if self.scheduler is None:
            return []
        return self.scheduler if isinstance(self.scheduler, list) else [self.scheduler]


@dataclass(frozen=True, kw_only=True)
class Layout(Section):
    """The ranks of one task: `ranks_of` has the equation."""

    num_workers: Count = 1  # N_W; under each sub-master, where there are some
    ranks_per_worker: Count = 1  # N_GPU
    ranks_per_stage: Count = 1  # of pipeline: ranks that divide each stage as `tensor` does
    num_masters: Count = 1  # that each own a part of the weights; of downpour, easgd, gem
    sub_masters: list[int] = field(default_factory=list)  # [2, 3]: 2, and 3 under each of these
    cores_per_rank: Count = 1  # and threads
    gpus_per_rank: Natural = 0  # several divide the layers of a model between them
    walltime_min: Positive = 60.0  # a task that runs longer is stopped and failed

    def __post_init__(self) -> None:
        super().__post_init__()
        for value in self.sub_masters:
            require(value >= 1, f"sub_masters: {value} is not at least 1")
        require(
            self.num_masters == 1 or not self.sub_masters,
            "sub_masters: the top master's weights are whole; set num_masters = 1",
        )
        require(
            self.ranks_per_worker % self.ranks_per_stage == 0,
            f"ranks_per_stage: {self.ranks_per_stage} does not divide ranks_per_worker = "
            f"{self.ranks_per_worker}, which are stages x ranks_per_stage",
        )


CENTRAL = ("downpour", "easgd", "gem")  # the strategies with a central copy of the weights
ONE_BATCH = ("tensor", "pipeline")  # those where the ranks of a worker train on the same batch


@dataclass(frozen=True)
class Ranks:
    """How many ranks of each kind a task has."""

    masters: int
    workers: int  # in all
    per_worker: int
    per_stage: int = 1  # of a pipeline's stages
    one_batch: bool = False  # whether the ranks of a worker train on the same batch

    @property
    def total(self) -> int:
        return self.masters + self.workers * self.per_worker

    @property
    def readers(self) -> int:
        """Ranks, or workers, that train on a batch of their own."""
        return self.workers * (1 if self.one_batch else self.per_worker)

    def __str__(self) -> str:
        masters = f"{self.masters} master{'s' * (self.masters > 1)} + " if self.masters else ""
        factors = [(self.workers, "worker"), (self.per_worker // self.per_stage, "rank")]
        if self.per_stage > 1:
            factors = [factors[0], (factors[1][0], "stage"), (self.per_stage, "rank")]
        shown = " x ".join(f"{number} {noun}{'s' * (number > 1)}" for number, noun in factors)
        return f"{masters}{shown} = {self.total} rank{'s' * (self.total > 1)}"


def ranks_of(training: Training, layout: Layout) -> Ranks:
    """N_M masters + N_W workers of N_GPU ranks each.

    With sub-masters, N_W is the number of workers of each of the lowest ones. Without a central
    copy of the weights, or with one in shared memory, there are no masters.
    """
    if training.strategy not in CENTRAL:
        one_batch = training.strategy in ONE_BATCH
        per_stage = layout.ranks_per_stage
        return Ranks(0, layout.num_workers, layout.ranks_per_worker, per_stage, one_batch)
    levels = list(itertools.accumulate(layout.sub_masters, operator.mul, initial=1))
    masters = sum(levels) if layout.sub_masters else layout.num_masters
    if training.exchange.transport == "window":
        masters = 0
    return Ranks(masters, levels[-1] * layout.num_workers, layout.ranks_per_worker)


def batches_of_update(training: Training, layout: Layout) -> int:
    """How many batches of `batch_size` are averaged in one update of the weights."""
    ranks, exchange = ranks_of(training, layout), training.exchange
    if training.strategy in CENTRAL:
        waits = training.strategy == "downpour" and exchange.synchronous
        together = ranks.workers - exchange.backup_workers if waits else 1
        return together * ranks.per_worker
    if averages_weights(training):
        return ranks.per_worker * training.accumulate
    return (training.lanes or ranks.readers) * training.accumulate


def averages_weights(training: Training) -> bool:
    """Whether workers train apart and average their weights now and then (local SGD)."""
    return training.strategy == "allreduce" and training.reduction.average_every > 1


@dataclass(frozen=True, kw_only=True)
class Objective(Section):
    """The figure of merit that a task returns to the search."""

    metric: str = "val_loss"  # of what is measured each epoch
    goal: Literal["min", "max"]  # whether less or more of it is better


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """Digests of what a study is made of besides its own text. Part of every task's key."""

    data: str  # of the contents of the data files, in order
    model: str  # of the model's source and of the local files that it imports
    code: str  # of the training program


@dataclass(frozen=True, kw_only=True)
class Start(Section):
    """The finished task whose last state a task goes on from; that task had `keep_state`."""

    key: str
    folder: str  # absolute


@dataclass(frozen=True, kw_only=True)
class TrainTask:
    """One (trial, fold): all that a training job needs to know. Written as `task.json`."""

    study: str
    trial: int
    fold: int  # 0 .. folds - 1
    seed: int  # of weights, shuffling and dropout; from (study seed, trial, fold)
    split_seed: int  # of the fold split; the same for all trials of a study
    model: Model
    data: Data  # files are absolute here
    training: Training
    layout: Layout
    objective: Objective
    fingerprint: Fingerprint
    start: Start | None = None  # training.epochs then counts those of the earlier task too
    keep_state: bool = False  # whether another task may go on from this one

    @property
    def id(self) -> str:
        return f"t{self.trial:03d}-f{self.fold}"

    @property
    def ranks(self) -> Ranks:
        return ranks_of(self.training, self.layout)

    @property
    def scaled_training(self) -> Training:
        """With the learning rates of as many batches as an update has.

        Linear scaling: Goyal et al. 2017 (arXiv:1706.02677); sqrt: Krizhevsky 2014
        (arXiv:1404.5997).
        """
        scaling = self.training.lr_scaling
        if scaling == "none":
            return self.training
        batches = batches_of_update(self.training, self.layout)
        return self.training.with_rates(batches if scaling == "linear" else math.sqrt(batches))

    def key(self) -> str:
        """Hash of all that can change the result.

        Not in it: names, places and limits (study, trial number, file paths, time limits, memory),
        and what is only looked at (TensorBoard). The contents of the files are in it through the
        fingerprint, and an earlier task's state through that task's key.
        """
        content = dataclasses.asdict(self)
        for name in ("study", "trial"):
            del content[name]
        for name in ("files", "memory_gb", "cache", "copy_command"):
            del content["data"][name]
        content["model"]["source"] = without_folder(self.model.source)
        del content["model"]["files"]
        for name in ("loss", "metrics"):
            content["training"][name] = with_sources(content["training"][name], without_folder)
        for name in ("reader", "collate"):
            if content["data"][name] is not None:
                content["data"][name] = without_folder(content["data"][name])
        for name in ("weights", "file_numbers"):  # results from before there were any stay valid
            if content["data"][name] is None:
                del content["data"][name]
        del content["training"]["tensorboard"]
        del content["layout"]["walltime_min"]
        if content["start"] is not None:
            del content["start"]["folder"]
        return hashlib.sha256(canonical_json(content).encode()).hexdigest()[:32]

    def write(self, path: Path) -> None:
        # Whoever starts the task again, after a crash of the host, writes it again.
        write_json(path, dataclasses.asdict(self), durable=False)

    @classmethod
    def read(cls, path: Path) -> TrainTask:
        return from_dict(cls, read_json(path))


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """What a finished task reports. Written as `result.json` by rank 0, atomically, last of all."""

    key: str
    fom: float  # objective.metric at the selected epoch
    epoch: int  # the selected epoch, from 1
    start_epoch: int  # epochs of the task that it went on from, and of those before; 0 if none
    epochs: int  # the last epoch trained; `epoch` and this one count from the first task's first
    stopped: str  # why the training ended: epochs, early_stopping, target, max_minutes
    metrics: dict[str, float]  # at the selected epoch: loss, val_loss, ...
    seconds: float  # of training, summed over resumed attempts, start-up not included
    samples_per_second: float  # all ranks together, during training steps
    training_s: float  # in training steps, of the mean rank; the sum of the four that follow
    compute_s: float
    communication_s: float  # that nothing was computed beside
    data_s: float  # waiting for the next batch
    idle_s: float  # waiting for the slowest rank at the end of an epoch
    inference_us: float  # microseconds an event, in validation, reading not included
    num_ranks: int
    lost_ranks: int = 0  # that died, where the others may go on
    updates: int | None = None  # of the central weights, where there are some
    staleness: float | None = None  # of these updates, in the mean; history.jsonl has each epoch's
    hosts: list[str]
    devices: list[str]  # one a rank
    num_train: int
    num_val: int
    num_parameters: int
    versions: dict[str, str]

    def write(self, path: Path) -> None:
        write_json(path, dataclasses.asdict(self))

    @classmethod
    def read(cls, path: Path) -> TrainResult:
        return from_dict(cls, read_json(path))


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a task has no result. Written as `failure.json` by the rank that failed first."""

    reason: Literal[
        "diverged",
        "exception",
        "parent",  # the state that it was to go on from is gone, or does not fit
        "oom",  # no memory left, of the host or of a GPU
        "time_limit",  # the task's own
        "walltime",  # the batch job around it ended
        "node_lost",
        "launch_failed",  # its ranks never began
        "exit",
        "signal",
    ]
    message: str  # one line for the ledger
    rank: int | None = None
    code: int | None = None  # the exit status, or the number of the signal

    @property
    def name(self) -> str:
        """As in the ledger: "exit 3", "signal 9", or the reason."""
        return self.reason if self.code is None else f"{self.reason} {self.code}"

    def write(self, path: Path) -> None:
        write_json(path, dataclasses.asdict(self))

    @classmethod
    def read(cls, path: Path) -> Failure:
        return from_dict(cls, read_json(path))


@dataclass(frozen=True)
class TaskPaths:
    """Every file of a task. No other place knows their names."""

    folder: Path

    @property
    def task(self) -> Path:
        return self.folder / "task.json"

    @property
    def result(self) -> Path:
        return self.folder / "result.json"

    @property
    def failure(self) -> Path:
        return self.folder / "failure.json"

    @property
    def history(self) -> Path:
        """JSON lines, one an epoch: epoch, loss, val_loss, metrics, lr, seconds."""
        return self.folder / "history.jsonl"

    @property
    def tensorboard(self) -> Path:
        """The folder of TensorBoard's event files, one an attempt; see `apps.tensorboard`."""
        return self.folder / "tensorboard"

    @property
    def checkpoint(self) -> Path:
        """Where a training goes on after a kill; gone when the result is there."""
        return self.folder / "checkpoint.pt"

    @property
    def state(self) -> Path:
        """The last checkpoint, where another task may go on; there before the result is."""
        return self.folder / "state.pt"

    @property
    def weights(self) -> Path:
        """The model's state_dict at the selected epoch."""
        return self.folder / "weights.pt"

    @property
    def transforms(self) -> Path:
        """The steps of `data.transforms`, with the numbers that were taken from the training."""
        return self.folder / "transforms.json"

    @property
    def place(self) -> Path:
        """Where the last attempt runs: its batch job, its nodes, and the launcher's process."""
        return self.folder / "place.json"

    @property
    def begun(self) -> Path:
        """There as soon as the ranks of the last attempt have found each other."""
        return self.folder / "begun"

    @property
    def stdout(self) -> Path:
        return self.folder / "stdout.txt"

    @property
    def stderr(self) -> Path:
        return self.folder / "stderr.txt"


def canonical_json(content: Any) -> str:
    """The one text of `content`: sorted keys, no spaces, no NaN. 1 and 1.0 stay different."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)


def write_text(path: Path, text: str, *, durable: bool = True) -> None:
    """Write beside, then rename: a reader sees the old file or the new one, never half of it.

    Args:
        durable: so even after a crash of the host, for which a disk takes some milliseconds.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with _named(path), open(beside, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        if durable:
            os.fsync(file.fileno())
    os.replace(beside, path)


def write_json(path: Path, content: Any, *, durable: bool = True) -> None:
    """Write `content` as JSON, atomically (see `write_text`)."""
    write_text(path, json.dumps(content, indent=1) + "\n", durable=durable)


def append_json_line(path: Path, content: Mapping[str, Any]) -> None:
    """Append one JSON line with one write and an fsync.

    A line that a kill tore off earlier is ended first, so that it cannot swallow this one.
    """
    line = (json.dumps(content) + "\n").encode()
    with _named(path), open(path, "ab+") as file:
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                line = b"\n" + line
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """A full disk is noticed while writing, where the error does not know the file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a JSON-lines file; a torn one (a kill in mid-write) is left out."""
    return json_rows(path.read_bytes()) if path.exists() else []


def json_rows(lines: bytes) -> list[dict[str, Any]]:
    return [row for line in lines.split(b"\n") if (row := json_row(line)) is not None]


def json_row(line: bytes) -> dict[str, Any] | None:
    """None of a line that is no row: torn by a kill, or empty."""
    try:
        row = json.loads(line) if line.strip() else None
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def from_dict(cls: type[T], content: Any) -> T:
    """Rebuild a dataclass from its `asdict`, nested dataclasses too.

    Raises:
        TypeError: `content` lacks a field of `cls` or has one too many.
    """
    hints = _hints(cls)  # type: ignore[arg-type]  # a class is hashable
    return cls(**{name: _from_plain(hints.get(name), value) for name, value in content.items()})


_hints = functools.cache(get_type_hints)  # each reading takes a millisecond


def _from_plain(hint: Any, value: Any) -> Any:
    if get_origin(hint) in (Union, types.UnionType):  # of sections only "Section | None" is used
        sections = [arg for arg in get_args(hint) if dataclasses.is_dataclass(arg)]
        hint = sections[0] if sections and isinstance(value, dict) else None
    is_section = isinstance(hint, type) and dataclasses.is_dataclass(hint)
    return from_dict(hint, value) if is_section else value
