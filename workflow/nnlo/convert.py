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
from workflow.nnlo.options import ENVIRONMENT, OPTIMIZATION, OPTIONS, TRAINING, Given

CROSS_ENTROPY = "cross_entropy"

# NNLO's names of losses, those of Keras and those of torch.nn.
LOSSES = {
    "categorical_crossentropy": CROSS_ENTROPY,
    "sparse_categorical_crossentropy": CROSS_ENTROPY,
    "CrossEntropy": CROSS_ENTROPY,
    "NLL": "nll_loss",
    "binary_crossentropy": "binary_cross_entropy_with_logits",
    "BCE": "binary_cross_entropy_with_logits",
    "BCEWithLogits": "binary_cross_entropy_with_logits",
    **dict.fromkeys(("mean_squared_error", "mse", "MSE"), "mse_loss"),
    **dict.fromkeys(("mean_absolute_error", "mae", "L1"), "l1_loss"),
    "SmoothL1": "smooth_l1_loss",
}
OF_NUMBERS = ("mse_loss", "l1_loss", "smooth_l1_loss")  # and not of classes

# NNLO's learning rates, where none was given: of its masters, and of workers in Keras and torch.
MASTER_RATES = {"sgd": 0.01, "adam": 0.001, "rmsprop": 0.01, "adadelta": 1.0}
WORKER_RATES = {
    **{"sgd": 1.0, "adam": 0.001, "rmsprop": 0.001, "adadelta": 1.0},
    **{"adagrad": 0.01, "adamax": 0.002, "nadam": 0.002},
}
TORCH_RATES = {"rmsprop": 0.01}
# Keras's names of an optimizer's arguments, where torch has others.
ARGUMENTS = {"learning_rate": "lr", "epsilon": "eps"}


@dataclass(frozen=True)
class Blocks:
    """How NNLO divided its ranks."""

    at_once: int  # blocks, or 1
    masters: int
    workers: int
    per_worker: int

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
    for key in ("n_masters", "n_processes", "block_size", "n_fold"):
        if given[key] < 1:
            raise N3LOError(f"--{key.replace('_', '-')} {given[key]} is not at least 1")
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
        return Blocks(1, masters, max(1, masters - 1), per_worker)
    if size == 1:
        return Blocks(at_once, 0, 1, 1)
    workers = (size - masters) // per_worker
    least = max(1, masters - 1)
    if workers < least:
        raise N3LOError(
            f"{size} ranks of a training are too few for --n-masters {masters} and {least} workers "
            f"of --n-processes {per_worker}; give --ranks, or --block-size"
        )
    return Blocks(at_once, masters, workers, per_worker)


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
        draft.note(": ".join((name, *ENVIRONMENT[name])))
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
    words = [str(said or "nnlo")] + ([given["trial_name"]] if given.has("trial_name") else [])
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(words)).strip("-._") or "nnlo"
    where = "get_name()" if said else "get_name() is not there"
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
            "targets that it gives into the data files, and name them by --labels-name"
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
    draft.set("training.epochs", given["epochs"], given.said("epochs"))
    batch, ranks = given["batch"], blocks.per_worker
    why = given.said("batch")
    if ranks > 1:
        why += f" / {given.said('n_processes')}: in NNLO all ranks of a worker had the same batch"
    draft.set("training.batch_size", max(1, batch // ranks), why)
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
        exchange["elastic_force"] = min(given["elastic_force"], 1.0)
        reasons.append(f"{given.said('elastic_force')}: over the workers, not all ranks; at most 1")
    if mode != "gem" and given["sync_every"] > 1:
        exchange["sync_every"] = given["sync_every"]
        reasons.append(given.said("sync_every"))
    if given.has("synchronous"):
        _synchronous(draft, exchange, reasons, blocks, mode)
    if exchange:
        draft.set("training.exchange", exchange, "; ".join(reasons))
    unused = [key for key in _of_mode(mode) if given.has(key)]
    for key in unused:
        draft.note(f"{given.said(key)}: mode '{mode}' does not use it")


def _of_mode(mode: str) -> list[str]:
    """The options that belong to other modes."""
    return {
        "gem": ["elastic_force", "optimizer", "sync_every"],
        "easgd": ["gem_lr", "gem_momentum", "gem_kappa", "optimizer"],
        "downpour": ["gem_lr", "gem_momentum", "gem_kappa", "elastic_force"],
    }[mode]


def _synchronous(
    draft: Draft, exchange: dict[str, Plain], reasons: list[str], blocks: Blocks, mode: str
) -> None:
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
    if said == "binary_crossentropy":
        loss, why = CROSS_ENTROPY, f"{why}: with torch, NNLO took cross entropy for it"
    if loss is None:
        raise N3LOError(
            f"--loss {given['loss']}: give one of {', '.join(LOSSES)}; training.loss of the study "
            "may then name any of torch.nn.functional, or a function of yours"
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
        settings = {"name": name, "lr": _rate(MASTER_RATES, name, "--optimizer")}
        why = (
            f"{given.said('optimizer')}; gets gradients, where NNLO sent steps of "
            f"{given.said('worker_optimizer')}"
        )
    else:
        settings = _worker_optimizer(draft, past)
        why = given.said("worker_optimizer", "worker_optimizer_params")
    draft.set("training.optimizer", settings, why)


def _rate(rates: Mapping[str, float], name: str, option: str) -> float:
    if name not in rates:
        raise N3LOError(f"{option} {name}: NNLO had no such optimizer, only {', '.join(rates)}")
    return rates[name]


def _worker_optimizer(draft: Draft, past: Past) -> dict[str, Plain]:
    given = past.given
    name = given["worker_optimizer"]
    rates = WORKER_RATES if past.facts["is_keras"] else {**WORKER_RATES, **TORCH_RATES}
    settings: dict[str, Plain] = {"name": name, "lr": _rate(rates, name, "--worker-optimizer")}
    params = _params(given["worker_optimizer_params"])
    betas = [params.pop(key, default) for key, default in (("beta_1", 0.9), ("beta_2", 0.999))]
    if betas != [0.9, 0.999]:
        settings["betas"] = betas
    if params.pop("decay", 0):
        draft.note("--worker-optimizer-params: decay: set training.scheduler instead")
    for key, value in params.items():
        settings[ARGUMENTS.get(key, key)] = value
    return settings


def _params(text: str) -> dict[str, Plain]:
    try:
        params = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        params = None
    if not isinstance(params, dict) or not all(
        isinstance(key, str) and isinstance(value, bool | int | float | str)
        for key, value in params.items()
    ):
        raise N3LOError(
            f"--worker-optimizer-params {text}: is no dict of Python with numbers, such as "
            "\"{'lr': 0.01}\""
        )
    return params


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
        draft.note("how many ranks NNLO had is not known: give --ranks N, or change layout")
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
    if given.has("target_objective"):
        value = round(1 - given["target_objective"], 10)
        draft.set("search.stop", {"value": value}, f"1 - {given.said('target_objective')}")
    for dimension in facts["parameters"]:
        facts_of = {key: value for key, value in dimension.items() if key != "name"}
        draft.set(f"search.space.model.args.{dimension['name']}", facts_of)


def too_many_ranks(blocks: Blocks) -> int | None:
    """The ranks of a training, where this host has fewer cores."""
    ranks = blocks.masters + blocks.workers * blocks.per_worker
    return ranks if ranks > (os.cpu_count() or 1) else None
