"""From what NNLO was told to a study: each value with the option that it comes from."""

from __future__ import annotations

import ast
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apps.contract import OWN_LOSS, N3LOError, Plain, goal_of
from workflow.nnlo.draft import Draft
from workflow.nnlo.options import (
    ALWAYS,
    ENVIRONMENT,
    NOTHING,
    OPTIMIZATION,
    OPTIONS,
    TRAINING,
    Given,
)

CROSS_ENTROPY = "cross_entropy"

# The losses that NNLO knew with torch, by its names, as far as they are here. It took cross entropy
# for what it did not know.
LOSSES = {
    "categorical_crossentropy": CROSS_ENTROPY,
    "CrossEntropy": CROSS_ENTROPY,
    "NLL": "nll_loss",
    "MultiMargin": "multi_margin_loss",
    "BCE": "binary_cross_entropy_with_logits",
    "BCEWithLogits": "binary_cross_entropy_with_logits",
    **dict.fromkeys(("mean_squared_error", "MSE"), "mse_loss"),
    **dict.fromkeys(("mean_absolute_error", "L1"), "l1_loss"),
    "SmoothL1": "smooth_l1_loss",
}
OF_NUMBERS = ("mse_loss", "l1_loss", "smooth_l1_loss")  # and not of classes
NOT_HERE = (  # NNLO knew them, and they need more than outputs and targets, or other ones
    *("PoissonNLL", "KLDiv", "MarginRanking", "HingeEmbedding", "MultiLabelMargin", "SoftMargin"),
    *("MultiLabelSoftMargin", "CosineEmbedding", "TripletMargin"),
)

# What NNLO's optimizers had where nothing was given, where torch has other values or asks for one.
Settings = Mapping[str, Mapping[str, Plain]]
MASTERS: Settings = {
    **{"sgd": {"lr": 0.01}, "adam": {"lr": 0.001}},
    **{"rmsprop": {"lr": 0.01}, "adadelta": {"lr": 1.0}},
}
KERAS_MASTERS: Settings = {
    **{"sgd": {"lr": 0.01}, "adam": {"lr": 0.001}},
    "rmsprop": {"lr": 0.001, "alpha": 0.9, "eps": 1e-10},
    "adadelta": {"lr": 0.001, "rho": 0.95, "eps": 1e-8},
}
WORKERS: Settings = {
    **MASTERS,
    "sgd": {"lr": 1.0},
    # which NNLO knew with Keras alone
    **{name: {"name": "sgd", "lr": 0.001} for name in ("adagrad", "adamax", "nadam")},
}
KERAS_WORKERS: Settings = {
    "sgd": {"lr": 1.0},
    "adam": {"lr": 0.001, "eps": 1e-7},
    "rmsprop": {"lr": 0.001, "alpha": 0.9, "eps": 1e-7},
    "adadelta": {"lr": 1.0, "rho": 0.95, "eps": 1e-7},
    "adagrad": {"lr": 0.01, "eps": 1e-7},
    "adamax": {"lr": 0.002, "eps": 1e-7},
    "nadam": {"lr": 0.002, "eps": 1e-7},
}
# Keras's names of an optimizer's arguments, where torch has others; and what else torch takes.
ARGUMENTS = {"learning_rate": "lr", "epsilon": "eps", "schedule_decay": "momentum_decay"}
OF_TORCH = (
    *("lr", "eps", "alpha", "rho", "betas", "momentum", "momentum_decay", "nesterov", "amsgrad"),
    *("centered", "weight_decay", "dampening", "initial_accumulator_value"),
)
OFF_AT_0 = ("decay", "clipnorm", "clipvalue")  # of Keras's, which torch's optimizers do not take
AT_LEAST_1 = (
    *("n_masters", "n_processes", "block_size", "n_fold", "batch", "epochs", "sync_every"),
    *("num_iterations", "ga_populations"),
)
# Options that are given in vain in each mode.
OF_GEM = ("gem_lr", "gem_momentum", "gem_kappa")
UNUSED = {
    "gem": ("worker_optimizer_params", "elastic_force", "optimizer", "sync_every"),
    "easgd": (*OF_GEM, "optimizer"),
    "downpour": ("worker_optimizer_params", *OF_GEM, "elastic_force"),
    "local": (
        *("mode", "n_masters", "n_processes", "synchronous", "sync_every"),
        *(*OF_GEM, "elastic_force", "optimizer"),
    ),
}


@dataclass(frozen=True)
class Blocks:
    """How NNLO divided its ranks."""

    at_once: int  # blocks, or 1
    masters: int
    workers: int
    per_worker: int
    size: int  # the ranks of one, whose folds are side by side

    @property
    def is_alone(self) -> bool:
        return self.masters == 0


@dataclass(frozen=True)
class Past:
    """A study of NNLO's: how it was started, and what its model file says."""

    driver: str
    given: Given
    num_ranks: int | None
    environment: list[str]
    facts: Mapping[str, Any]  # as `apps.nnlo_import` reports them

    @property
    def searches(self) -> bool:
        return self.driver == OPTIMIZATION


def blocks_of(past: Past) -> Blocks:
    """By N = 1 + blocks x folds x (masters + workers x ranks of each), or without the 1 and blocks.

    Raises:
        N3LOError: NNLO would not have run with these numbers.
    """
    given, ranks = past.given, past.num_ranks
    for key in AT_LEAST_1:
        if given[key] < 1:
            raise N3LOError(f"{OPTIONS[key].name} {given[key]} is not at least 1")
    if ranks is not None and ranks < 1:
        raise N3LOError(f"--ranks {ranks} is not at least 1")
    masters, per_worker = given["n_masters"], given["n_processes"]
    at_once, size = 1, ranks
    if past.searches:
        of_block, folds = given["block_size"], given["n_fold"]
        if ranks is not None:
            at_once, rest = divmod(ranks - 1, of_block)
            if rest or not at_once:
                raise N3LOError(
                    f"{ranks} ranks: NNLO ended at once unless they were 1 + blocks x --block-size "
                    f"{of_block}; give the right numbers"
                )
        size, rest = divmod(of_block, folds)
        if rest:
            raise N3LOError(
                f"--block-size {of_block} is no multiple of --n-fold {folds}, whose folds would "
                "train with different numbers of ranks"
            )
    if size is None:
        workers = max(1, masters - 1)
        return Blocks(1, masters, workers, per_worker, masters + workers * per_worker)
    of_all = given["block_size"] if past.searches else size
    if size == 1:
        return Blocks(at_once, 0, 1, 1, of_all)
    workers = (size - masters) // per_worker
    least = max(1, masters - 1)
    if workers < least:
        raise N3LOError(
            f"{size} ranks of a training are too few for --n-masters {masters} and {least} workers "
            f"of --n-processes {per_worker}; give --ranks, or --block-size"
        )
    return Blocks(at_once, masters, workers, per_worker, of_all)


def draft_of(past: Past, source: str, collate: str | None, folder: Path) -> Draft:
    """The study that does what NNLO did.

    Args:
        past: what it was.
        source: of the model, as model.source has it.
        collate: of an adaptor that no step of data.transforms does, as data.collate has it.
        folder: of the study; data files in it are named relative to it.

    Raises:
        N3LOError: what was said to NNLO cannot be said here.
    """
    blocks = blocks_of(past)
    draft = Draft(_heading(past, blocks))
    _name(draft, past)
    _model(draft, past, source)
    _data(draft, past, folder, collate)
    _training(draft, past, blocks)
    _layout(draft, past, blocks)
    _search(draft, past, blocks)
    for line in past.given.idle():
        draft.note(line)
    for name in past.environment:
        becomes, remark = ENVIRONMENT[name]
        has_key = becomes not in (ALWAYS, NOTHING)
        what = f"not carried over; set {becomes}" if has_key else becomes
        draft.note(f"{name}: {what}: {remark}")
    return draft


def _heading(past: Past, blocks: Blocks) -> str:
    lines = [
        f"Made by 'n3lo import-nnlo' from a study for {past.driver.removesuffix('.py')} of NNLO.",
        "Comments name the option that a value comes from; docs/coming_from_nnlo.md has them all.",
        "",
    ]
    trainings = f"{blocks.at_once} at once" if past.searches else "one training"
    if blocks.is_alone:
        lines.append(f"ranks = {trainings}, each of 1")
    else:
        masters = f"{blocks.masters} master{'s' * (blocks.masters > 1)}"
        workers = f"{blocks.workers} worker{'s' * (blocks.workers > 1)}"
        workers += f" x {blocks.per_worker} ranks" if blocks.per_worker > 1 else ""
        lines.append(f"ranks = {trainings}, each of {masters} + {workers}")
    return "\n".join(lines)


def _name(draft: Draft, past: Past) -> None:
    given, said = past.given, past.facts["name"]
    file = Path(given.values.get("model_file") or given.values.get("model") or "nnlo")
    words = [str(said or file.stem)] + ([given["trial_name"]] if given.has("trial_name") else [])
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(words)).strip("-._") or "nnlo"
    where = "get_name()" if said else "the model file; get_name() is not there"
    if given.has("trial_name"):
        where += f", {given.said('trial_name')}"
    draft.set("name", name, where)
    draft.set("seed", 1, "NNLO had none: weights and genetic searches differed each time")


def _model(draft: Draft, past: Past, source: str) -> None:
    facts = past.facts
    why = f"made beside NNLO's file: {', and '.join(facts['needs'])}" if facts["needs"] else ""
    draft.set("model.source", source, why)
    if past.searches and facts["args"]:
        why = "get_model's own defaults, or the middle of the ranges; [search.space] replaces them"
        draft.set("model.args", facts["args"], why)


# -- data ------------------------------------------------------------------------------------------


def _data(draft: Draft, past: Past, folder: Path, collate: str | None) -> None:
    given, facts = past.given, past.facts
    train, val = facts["train"], facts["val"]
    files = list(dict.fromkeys([*train, *val]))
    said = given.said("train_data", "val_data") if given.has("train_data") else None
    draft.set(
        "data.files", [_relative(file, folder) for file in files], said or "get_train(), get_val()"
    )
    gone = [file for file in files if file not in facts["events"]]
    if gone:
        draft.note(f"data.files: {len(gone)} of {len(files)} are not here, such as '{gone[0]}'")
    _fields(draft, facts, collate)
    if past.searches and given["n_fold"] > 1:
        why = f"{given.said('n_fold')}; of events, where NNLO's were of files"
        draft.set("data.folds", given["n_fold"], why)
    else:
        _held_out(draft, train, val, facts["events"])
    for option, key in (("cache_data", "data.cache"), ("copy_command", "data.copy_command")):
        if given.has(option):
            draft.set(key, given[option], OPTIONS[option].name)


def _relative(file: str, folder: Path) -> str:
    path = Path(file)
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else file


def _fields(draft: Draft, facts: Mapping[str, Any], collate: str | None) -> None:
    steps = {}
    for role, key in (("features", "inputs"), ("labels", "targets")):
        fact = facts[role]
        is_function = fact["steps"] or fact["field"] != fact["name"] or not fact["known"]
        why = f"get_{role}() or --{role}-name" + (", with its function" if is_function else "")
        draft.set(f"data.{key}", fact["field"], why)
        if fact["steps"]:
            steps[fact["field"]] = fact["steps"]
    if steps:
        draft.set("data.transforms", steps, "what these functions did to each file")
    if not facts["labels"]["known"]:
        raise N3LOError(
            "get_labels(): its function does what no step of data.transforms does; write the "
            "targets that it gives into the data files, and have get_labels() name them"
        )
    if collate is not None and not facts["features"]["alone"]:
        raise N3LOError(
            "get_features(): its function drops or mixes events, or measures all of a file, and "
            "data.collate has only a batch; write what it gives into the data files, and have "
            "get_features() name that"
        )
    if collate is not None and facts["is_keras"]:
        raise N3LOError(
            "get_features(): its function does what no step of data.transforms does, and "
            "data.collate is for models of torch; do it in the model, or write what it gives into "
            "the data files, and have get_features() name that"
        )
    if collate is not None:
        why = "the function of get_features(): of each batch, where NNLO called it for each file"
        draft.set("data.collate", collate, why)


def _held_out(
    draft: Draft, train: list[str], val: list[str], events: Mapping[str, int | None]
) -> None:
    """The fraction of all events that NNLO validated on."""
    if not val:
        draft.set("data.validation_fraction", 0.2, "there is no get_val()")
        return
    alone = [file for file in val if file not in train]
    if len(alone) < len(val):
        draft.note(
            "get_train() and get_val() share files, so that NNLO validated on what it trained on; "
            "here events are held out"
        )
    if not alone:
        draft.set("data.validation_fraction", 0.2, "NNLO validated on files that it trained on")
        return
    files = list(dict.fromkeys([*train, *val]))
    known = {file: events.get(file) or 0 for file in files}
    if all(known.values()):
        share = sum(known[file] for file in alone) / sum(known.values())
    else:
        share = len(alone) / len(files)
    fraction = min(max(round(share, 4), 0.0001), 0.5)
    why = "as many as get_val() had; drawn from all files by a seed"
    draft.set(
        "data.validation_fraction",
        fraction,
        why if fraction == round(share, 4) else f"at most half; get_val() had {share:.0%}",
    )


# -- training --------------------------------------------------------------------------------------


def _training(draft: Draft, past: Past, blocks: Blocks) -> None:
    given = past.given
    mode = "local" if blocks.is_alone else given["mode"]
    _strategy(draft, past, blocks, mode)
    _unused(draft, given, mode)
    draft.set("training.epochs", given["epochs"], given.said("epochs"))
    batch, ranks = given["batch"], blocks.per_worker
    why = given.said("batch")
    if ranks > 1:
        why += f" / {given.said('n_processes')}: in NNLO all ranks of a worker had the same batch"
    draft.set("training.batch_size", max(1, batch // ranks), why)
    if batch % ranks:
        draft.note(
            f"training.batch_size: {given.said('batch')} does not come out even over "
            f"{given.said('n_processes')}: a worker's batch is {max(1, batch // ranks) * ranks}"
        )
    loss = _loss(draft, past)
    if loss not in (*OF_NUMBERS, OWN_LOSS):
        draft.set("training.metrics", ["accuracy"], "always, in NNLO: acc")
    _optimizer(draft, past, mode)
    if given.has("early_stopping"):
        _early_stopping(draft, given)
    if given.has("target_metric"):
        metric, _, value = _condition(given, "target_metric")
        target = {"metric": metric, "value": value}
        draft.set("training.target", target, given.said("target_metric"))
    draft.set("training.select", "last", "the epoch of NNLO's figure of merit; or 'best'")


def _strategy(draft: Draft, past: Past, blocks: Blocks, mode: str) -> None:
    given = past.given
    if mode == "local":
        draft.set("training.strategy", mode, "NNLO trained in the one process")
        return
    why = given.said("mode")
    if blocks.workers == 1:
        why += "; one worker under a master: 'local' trains as well, on one rank"
    draft.set("training.strategy", mode, why)
    exchange: dict[str, Plain] = {}
    reasons = []
    if mode == "gem":
        exchange["kappa"] = given["gem_kappa"]
        reasons.append(given.said("gem_kappa"))
    if mode == "easgd":
        exchange["elastic_force"], why = _elastic_force(draft, given, blocks)
        reasons.append(why)
    if mode != "gem" and given["sync_every"] > 1:
        exchange["sync_every"] = given["sync_every"]
        reasons.append(given.said("sync_every"))
    if given.has("synchronous"):
        _synchronous(draft, exchange, reasons, past, blocks)
    if exchange:
        draft.set("training.exchange", exchange, "; ".join(reasons))


def _elastic_force(draft: Draft, given: Given, blocks: Blocks) -> tuple[float, str]:
    """So that alpha, which is it over a master's workers, is NNLO's: over all ranks but one."""
    others = blocks.size - 1
    children = max(1, blocks.workers // max(1, blocks.masters - 1))
    force, why = given["elastic_force"], given.said("elastic_force")
    if children != others:
        force *= children / others
        why += (
            f" x {children} / {others}: here it is over a master's workers, not all ranks but one"
        )
    if force > 1:
        draft.note(f"{given.said('elastic_force')}: {force:g} is more than easgd takes: it is 1.0")
    return round(min(force, 1.0), 6), why


def _unused(draft: Draft, given: Given, mode: str) -> None:
    """A note for what belongs to other modes."""
    for key in UNUSED[mode]:
        if not given.has(key):
            continue
        why = f"mode '{mode}' does not use it"
        if mode == "local":
            why = "not carried over: one rank has nobody to exchange with"
        elif (mode, key) == ("gem", "sync_every"):
            why = "gem exchanges after every batch here, and NNLO's workers waited for so many"
        elif key == "worker_optimizer_params":
            why = "not carried over: workers send gradients here, and no steps of their optimizer"
        draft.note(f"{given.said(key)}: {why}")


def _synchronous(
    draft: Draft, exchange: dict[str, Plain], reasons: list[str], past: Past, blocks: Blocks
) -> None:
    mode = past.given["mode"]
    if past.searches:
        draft.note(
            f"--synchronous: not carried over: {OPTIMIZATION} never passed it on, and trained "
            "asynchronously; for the other set training.exchange.synchronous"
        )
        return
    if mode == "gem":
        draft.note("--synchronous: gem is asynchronous here; use downpour, or 'allreduce'")
        return
    exchange["synchronous"] = True
    reasons.append("--synchronous: the mean of the workers, where NNLO took the sum")
    spare = blocks.workers - math.ceil(0.95 * blocks.workers)
    if mode == "downpour" and spare and blocks.masters == 1:
        exchange["backup_workers"] = spare


def _loss(draft: Draft, past: Past) -> str:
    given, facts = past.given, past.facts
    said = given["loss"].removesuffix("Loss") or given["loss"]
    loss, why = LOSSES.get(said), given.said("loss")
    if facts["is_keras"]:
        draft.set("training.loss", OWN_LOSS, f"{why}: the model is compiled with it")
        return OWN_LOSS
    if said in NOT_HERE:
        raise N3LOError(
            f"--loss {given['loss']}: give one of {', '.join(LOSSES)}; training.loss of the study "
            "may then name any of torch.nn.functional, or a function of yours"
        )
    if loss is None:
        loss, why = CROSS_ENTROPY, f"{why}: with torch, NNLO took cross entropy for it"
        if given.has("loss"):
            draft.note(
                f"--loss {given['loss']}: with torch, NNLO did not know it, and took cross "
                "entropy; for another set training.loss, such as 'mse_loss'"
            )
    if loss == CROSS_ENTROPY:
        why += "; takes one-hot targets and class numbers"
    if facts["gives_probabilities"]:
        draft.note(
            "the model ends in a softmax, and training.loss applies one: have get_model return "
            "what goes into it"
        )
    draft.set("training.loss", loss, why)
    return loss


def _optimizer(draft: Draft, past: Past, mode: str) -> None:
    given = past.given
    if mode == "gem":
        settings = {"name": "sgd", "lr": given["gem_lr"], "momentum": given["gem_momentum"]}
        why = (
            f"{given.said('gem_lr', 'gem_momentum')}; of gradients, where NNLO took steps of "
            f"{given.said('worker_optimizer')}"
        )
    elif mode == "downpour":
        name = given["optimizer"].removesuffix("torch").removesuffix("tf")
        masters = KERAS_MASTERS if past.facts["is_keras"] else MASTERS
        settings = {"name": name, **_settings(masters, name, "--optimizer")}
        why = (
            f"{given.said('optimizer')}; gets gradients, where NNLO sent steps of "
            f"{given.said('worker_optimizer')}"
        )
    else:
        settings = _worker_optimizer(draft, past)
        why = given.said("worker_optimizer", "worker_optimizer_params")
    draft.set("training.optimizer", settings, why)


def _settings(known: Settings, name: str, option: str) -> Mapping[str, Plain]:
    if name not in known:
        raise N3LOError(f"{option} {name}: NNLO had no such optimizer, only {', '.join(known)}")
    return known[name]


def _worker_optimizer(draft: Draft, past: Past) -> dict[str, Plain]:
    given, is_keras = past.given, past.facts["is_keras"]
    name = given["worker_optimizer"]
    known = KERAS_WORKERS if is_keras else WORKERS
    settings = {"name": name, **_settings(known, name, "--worker-optimizer")}
    if settings["name"] != name:
        draft.note(f"--worker-optimizer {name}: with torch, NNLO did not know it, and took sgd")
    params = _params(given["worker_optimizer_params"])
    betas = [params.pop(key, default) for key, default in (("beta_1", 0.9), ("beta_2", 0.999))]
    if betas != [0.9, 0.999]:
        settings["betas"] = betas
    if "clipnorm" in params:
        draft.set("training.clip_norm", params.pop("clipnorm"), "--worker-optimizer-params")
    for key, value in params.items():
        torchs = "alpha" if (name, key) == ("rmsprop", "rho") else ARGUMENTS.get(key, key)
        if torchs in OF_TORCH or not is_keras:
            settings[torchs] = value
        else:
            remark = ": set training.scheduler instead" if key == "decay" else ""
            draft.note(f"--worker-optimizer-params: {key}: not carried over{remark}")
    return settings


def _params(text: str) -> dict[str, Plain]:
    """Of Python's text of a dict, without what is None, the optimizer's own, or off."""
    try:
        params = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        params = None
    if not isinstance(params, dict) or not all(
        isinstance(key, str) and isinstance(value, bool | int | float | str | tuple | list | None)
        for key, value in params.items()
    ):
        raise N3LOError(
            f"--worker-optimizer-params {text}: is no dict of Python with numbers, such as "
            "\"{'lr': 0.01}\""
        )
    return {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in params.items()
        if value is not None and (value or key not in OFF_AT_0)
    }


def _early_stopping(draft: Draft, given: Given) -> None:
    metric, relative, patience = _condition(given, "early_stopping")
    why = f"{given.said('early_stopping')}: epochs without a better one"
    if not relative:
        why += "; without ~ NNLO never stopped"
    settings = {"metric": metric, "patience": max(1, int(patience))}
    draft.set("training.early_stopping", settings, why)


def _condition(given: Given, key: str) -> tuple[str, bool, float]:
    """Of "val_loss,~<,4": the metric as it is called here, whether it was relative, the number.

    Raises:
        N3LOError: it is not of that form, or looks in the wrong direction.
    """
    text, name = given[key], OPTIONS[key].name
    match = re.fullmatch(r"\s*([\w:]+)\s*,\s*(~?)([<>])=?\s*,\s*([-+.\deE]+)\s*", text)
    try:
        if match is None:
            raise ValueError
        value = float(match[4])
    except ValueError:
        raise N3LOError(f"{name} {text}: is not of the form 'val_loss,~<,4'") from None
    if ":" in match[1]:
        raise N3LOError(f"{name} {text}: is of one of several models; name a metric alone")
    metric = re.sub(r"(^|_)acc$", r"\1accuracy", match[1])
    better = "min" if match[3] == "<" else "max"
    if goal_of(metric) != better:
        raise N3LOError(
            f"{name} {text}: of '{metric}' {'more' if better == 'min' else 'less'} is better; "
            f"write {'>' if better == 'min' else '<'}"
        )
    return metric, bool(match[2]), value


# -- layout and search -----------------------------------------------------------------------------


def _layout(draft: Draft, past: Past, blocks: Blocks) -> None:
    given = past.given
    size = given.said("block_size") if past.searches else f"{past.num_ranks} ranks"
    if past.num_ranks is None and not past.searches:
        size = "as NNLO had at least"
    if past.num_ranks is None:
        keys = "search.num_parallel is 1" if past.searches else "layout has the fewest"
        draft.note(f"how many ranks NNLO had is not known, and {keys}: give --ranks N")
    below = blocks.masters - 1
    if below > 0:
        each, rest = divmod(blocks.workers, below)
        draft.set("layout.num_workers", each, f"{size}; under each sub-master")
        draft.set("layout.sub_masters", [below], f"{given.said('n_masters')}: one over the others")
        if rest:
            draft.note(
                f"layout.num_workers: {blocks.workers} workers are {each} under each of {below} "
                f"sub-masters, and {rest} left over"
            )
    else:
        draft.set("layout.num_workers", blocks.workers, size)
    draft.set("layout.ranks_per_worker", blocks.per_worker, given.said("n_processes"))
    gpus = int(given["max_gpus"] != 0 and past.facts["num_gpus"] > 0)
    why = given.said("max_gpus")
    if given["max_gpus"] != 0:
        why += "; NNLO took what was free" + ("" if gpus else ": 1 where there is one")
    draft.set("layout.gpus_per_rank", gpus, why)
    draft.set("layout.walltime_min", 60, "of a training; NNLO had the job's alone")


def _search(draft: Draft, past: Past, blocks: Blocks) -> None:
    given, facts = past.given, past.facts
    objective = {"metric": "val_accuracy", "goal": "max"}
    if draft.values["training", "loss"] in OF_NUMBERS:
        objective = {"metric": "val_loss", "goal": "min"}
    if not past.searches:
        draft.set("search.method", "grid", f"{TRAINING} trained once: one trial")
        draft.set("search.objective", objective, "")
        draft.set("search.num_trials", 1, "for a search add dimensions, and trials")
        rate = draft.values["training", "optimizer"]["lr"]
        draft.set("search.space.training.optimizer.lr", {"type": "choice", "values": [rate]})
        return
    if not facts["parameters"]:
        raise N3LOError(
            f"get_model has no parameter_range, which {OPTIMIZATION} searched; add one, or give "
            "--driver training"
        )
    is_genetic = given["hyper_opt"] == "genetic"
    draft.set("search.method", "evolution" if is_genetic else "bayesian", given.said("hyper_opt"))
    draft.set("search.objective", objective, "NNLO: 1 - val_acc, the less the better")
    trials, why = given["num_iterations"], given.said("num_iterations")
    if is_genetic:
        trials, why = trials * given["ga_populations"], f"{why} x {given.said('ga_populations')}"
    draft.set("search.num_trials", trials, why)
    why = "blocks: (ranks - 1) / --block-size" if past.num_ranks else "NNLO's blocks; see --ranks"
    draft.set("search.num_parallel", blocks.at_once, why)
    if is_genetic:
        population = max(4, given["ga_populations"])
        draft.set("search.options", {"population": population}, given.said("ga_populations"))
        if population > given["ga_populations"]:
            draft.note(f"{given.said('ga_populations')}: a population has at least 4")
    if given.has("target_objective"):
        _stop(draft, given, str(objective["metric"]))
    for dimension in facts["parameters"]:
        facts_of = {key: value for key, value in dimension.items() if key != "name"}
        draft.set(f"search.space.model.args.{dimension['name']}", facts_of)


def _stop(draft: Draft, given: Given, metric: str) -> None:
    said = given.said("target_objective")
    if metric != "val_accuracy":
        draft.note(
            f"{said}: not carried over: NNLO's was 1 - val_acc, and the search is by {metric}; set "
            "search.stop"
        )
        return
    draft.set("search.stop", {"value": round(1 - given["target_objective"], 10)}, f"1 - {said}")


def too_many_ranks(blocks: Blocks) -> int | None:
    """The ranks of a training, where this host has fewer cores."""
    ranks = blocks.masters + blocks.workers * blocks.per_worker
    return ranks if ranks > (os.cpu_count() or 1) else None
