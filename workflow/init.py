"""`init`: the first study of a model and its data. Nothing is asked; what can be found out is.

`apps.draft` looks at the model and the data, in a process of its own, and what it reports becomes
a study with comments. It is checked as `plan` checks one before it is written.
"""

from __future__ import annotations

import glob
import os
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, time
from pathlib import Path
from typing import Any

from apps.contract import FILE, OWN_LOSS, N3LOError, Plain, goal_of
from sites import get
from workflow import datafiles, preflight, schema, session, toml, whole
from workflow.fingerprint import beside
from workflow.study import StudyFile, parse

EXAMPLE = "n3lo init my_model.py events.h5"
UPDATES = 1500  # of the weights, that a first training should come to
COLUMN = 40  # where comments begin


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a user says of a study that is to be."""

    model: str  # "my_model.py", "my_model.py:Name", "package.module:Name"
    data: Sequence[str]  # files or patterns
    args: Mapping[str, Plain] = field(default_factory=dict)  # of the model
    inputs: Sequence[str] = ()  # empty: to be found
    targets: Sequence[str] = ()


def write(wanted: Wanted, to: Path, runs: Path) -> list[str]:
    """Write a study, and the schema beside it; return what to say about it.

    Raises:
        N3LOError: it cannot be written, or would not run.
    """
    if to.exists():
        raise N3LOError(f"'{to}' is there already, and is left as it is; --to FILE writes another")
    whole.check_file(to)
    to.parent.mkdir(parents=True, exist_ok=True)  # data files are looked for from there
    found = preflight.look("draft", _request(wanted))
    text = compose(wanted, found, to)
    file = parse(text, to)
    checked = session.prepared(file, get("local", {}), runs).checked
    whole.write_whole(to, text)
    schema.write_beside(to)
    return list(_said(file, found, checked, to))


def args_of(texts: Sequence[str]) -> dict[str, Plain]:
    """`width=64` as TOML has it; what is no TOML is a text.

    Raises:
        N3LOError: it is not NAME=VALUE.
    """
    args: dict[str, Plain] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name.isidentifier() and equals):
            raise N3LOError(f"--arg {text}: write it as NAME=VALUE, such as width=64")
        try:
            read = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            read = value
        args[name] = value if isinstance(read, date | time) else read  # a study has neither
    return args


def _request(wanted: Wanted) -> dict[str, Any]:
    place, colon, name = wanted.model.partition(":")
    if place.endswith(".py"):
        path = Path(place).expanduser()
        if not path.is_file():
            raise N3LOError(f"there is no model file '{place}'; such as: {EXAMPLE}")
        place = str(path.resolve())
    elif not colon:
        raise N3LOError(
            f"'{wanted.model}' is neither a file (my_model.py, my_model.py:Name) nor "
            f"package.module:Name; such as: {EXAMPLE}"
        )
    else:
        place = str(beside(Path(), place) or place)
    files: dict[str, str] = {}  # by path, what named it
    for pattern in wanted.data:
        for match in (str(Path(each).resolve()) for each in _matches(pattern)):
            if match in files:
                raise N3LOError(f"'{pattern}' names '{match}' once more, after '{files[match]}'")
            files[match] = pattern
    return {
        "model": f"{place}{colon}{name}",
        "args": dict(wanted.args),
        "files": list(files),
        "file_numbers": _file_numbers(wanted.data, list(files.values())),
        "inputs": list(wanted.inputs),
        "targets": list(wanted.targets),
    }


def _file_numbers(data: Sequence[str], named_by: Sequence[str]) -> list[int] | None:
    """The place of what named each file; None where names do not tell one process from another.

    "part_1.h5" and "part_2.h5" do not, nor do "train.h5" and "test.h5".
    """
    kinds = [re.sub(r"\d+", "", Path(each).name.lower()) for each in data]
    are_parts = any(re.search("train|test|val", kind) for kind in kinds)
    if len(data) < 2 or len(set(kinds)) < len(kinds) or are_parts:
        return None
    return [list(data).index(each) for each in named_by]


def _matches(pattern: str) -> list[str]:
    found = datafiles.matching(pattern)
    if not found:
        what = "no file matches" if glob.has_magic(pattern) else "there is no data file"
        raise N3LOError(f"{what} '{pattern}'; such as: {EXAMPLE}")
    return found


# -- the sizes of a first study --------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """Of a study that ends in minutes and says something, from the number of events."""

    events: int

    @property
    def folds(self) -> int:
        return 3 if self.events < 50_000 else 1

    @property
    def batch_size(self) -> int:
        """About a 25th of the events, a power of two from 8 to 256."""
        return min(256, max(8, 1 << max(self.events // 25, 1).bit_length() - 1))

    @property
    def epochs(self) -> int:
        steps = max(self.events * 2 // 3 // self.batch_size, 1)
        return min(30, max(5, UPDATES // steps))


# -- the text --------------------------------------------------------------------------------------


def compose(wanted: Wanted, found: Mapping[str, Any], to: Path) -> str:
    """The study with its comments.

    Args:
        found: what `apps.draft` reports.
    """
    place, name = wanted.model.partition(":")[0], found["source"].rpartition(":")[2]
    sizes = Sizes(found["events"])
    source = f"{_relative(place, to) if place.endswith('.py') else place}:{name}"
    files = [_relative(each, to) for each in wanted.data]
    parts = [
        _head(name, found, to),
        _section(
            "",
            ("name", _name(place, name), "of the run folder: runs/<name>"),
            ("seed", 1, "of weights, folds, shuffling and search"),
        ),
        _section(
            "model",
            ("source", source, "relative to this file, or package.module:Name"),
            ("args", found["args"], f"keyword arguments of {name}"),
        ),
        _section(
            "data",
            ("files", files, "relative to this file, absolute, or patterns"),
            ("inputs", _as_study(found, "inputs"), "what the model is called with"),
            ("targets", _as_study(found, "targets"), f"what it learns: {found['why']}"),
            ("folds", sizes.folds, _folds_comment(sizes.folds)),
        ),
        _training(found, sizes),
        _section(
            "layout",
            ("cores_per_rank", 1, "and threads"),
            ("gpus_per_rank", 0, "1: a GPU for each training"),
            ("walltime_min", 60, "minutes; a training that takes longer is stopped"),
        ),
        _section(
            "search",
            ("method", "bayesian", "or random, evolution, halving, ...: docs/search.md"),
            ("objective", _objective(found), "what a trial is judged by, in its mean over folds"),
            ("num_trials", 12, "points of the space that are tried"),
            ("num_parallel", 2, "that run at once, where there are cores"),
        ),
        _space(found, sizes),
    ]
    return "\n\n".join(parts) + "\n"


def _relative(path: str, to: Path) -> str:
    """To the study's folder; an absolute path, which is meant so, stays one."""
    given, folder = Path(path).expanduser(), to.parent.resolve()
    if given.is_absolute():
        return str(given)
    return str(given) if folder == Path.cwd() else os.path.relpath(given.resolve(), folder)


def _as_study(found: Mapping[str, Any], role: str) -> str | list[str] | dict[str, str]:
    """A table, where the model has names for them."""
    names, keys = found[role], found["keys"][role == "targets"]
    if len(names) == len(keys):
        return dict(zip(keys, names, strict=True))
    return names[0] if len(names) == 1 else list(names)


def _name(place: str, name: str) -> str:
    """Of the class; of the file where what makes the model has a general name."""
    own = Path(place).stem if name.islower() and place.endswith(".py") else name
    return re.sub(r"[^a-z0-9._-]+", "_", own.lower()).strip("._-") or "study"


def _head(name: str, found: Mapping[str, Any], to: Path) -> str:
    width = max(map(len, found["fields"]), default=0)
    fields = [
        f"#   {text:<{width}}  {form}{_role(text, found)}" for text, form in found["fields"].items()
    ]
    lines = [
        f"#:schema ./{schema.NAME}",
        f"# {name}, on {found['events']} events. 'n3lo init' wrote this; change what you like.",
        "#",
        "# What the data hold of each event:",
        *fields,
        "#",
        f"# n3lo plan {to.name}    shows what would run",
        f"# n3lo run {to.name}     trains and searches; again, it goes on where it was",
        f"# n3lo report {to.name}  says what came out",
    ]
    return "\n".join(lines)


def _role(field: str, found: Mapping[str, Any]) -> str:
    """What a field of the data is to the study: also as a part, as in "(pt, eta)[:, 0]"."""
    for role in ("inputs", "targets"):
        for text in found[role]:
            if field in re.split(r"\s*[(),]\s*", text.partition("[")[0]):
                return f"  -> {role}"
    return ""


def _section(name: str, *rows: tuple[str, Any, str]) -> str:
    width = max(len(key) for key, _, _ in rows)
    lines = [f"[{name}]"] if name else []
    for key, value, comment in rows:
        line = f"{key:<{width}} = {toml.value(value, key)}"
        is_long = len(line) > COLUMN
        lines += [f"# {comment}", line] if is_long else [f"{line:<{COLUMN}}  # {comment}"]
    return "\n".join(lines)


def _folds_comment(folds: int) -> str:
    if folds == 1:
        return "one split: a fifth of the events validates; 3 or more: cross-validation"
    return "trainings of a trial, each validates on another part"


def _training(found: Mapping[str, Any], sizes: Sizes) -> str:
    is_own = found["loss"] == OWN_LOSS
    metrics = [] if is_own else [("metrics", found["metrics"], "measured beside the loss")]
    return _section(
        "training",
        ("strategy", "local", "one rank; of several: docs/parallel.md"),
        ("epochs", sizes.epochs, "passes over the training events, at most"),
        ("batch_size", sizes.batch_size, "events"),
        ("loss", found["loss"], "its own" if is_own else "of torch.nn.functional"),
        *metrics,
        ("optimizer", _optimizer(found), "any of torch.optim"),
        (
            "early_stopping",
            {"metric": "val_loss", "patience": 5},
            "after so many epochs in a row without an improvement",
        ),
    )


def _optimizer(found: Mapping[str, Any]) -> dict[str, Plain]:
    return found["optimizer"] or {"name": "adam", "lr": 1e-3}


def _objective(found: Mapping[str, Any]) -> dict[str, str]:
    by_accuracy = {"accuracy", "val_accuracy"} & set(found["metrics"])
    metric = "val_accuracy" if by_accuracy else "val_loss"
    return {"metric": metric, "goal": goal_of(metric) or "min"}


def _space(found: Mapping[str, Any], sizes: Sizes) -> str:
    size, lr = sizes.batch_size, float(_optimizer(found)["lr"])
    low, high = (float(f"{lr * factor:.6g}") for factor in (0.1, 100))
    dimensions: dict[str, Any] = {
        "training.optimizer.lr": {"type": "real", "low": low, "high": high, "log": True},
        "training.batch_size": {"type": "int", "low": size // 2, "high": size * 2, "log": True},
        **{f"model.args.{name}": each for name, each in found["space"].items()},
    }
    lines = [
        "[search.space]  # any value of the study, by its dotted path; the rest stays as it is",
        *(f"{toml.key(path)} = {toml.value(each, path)}" for path, each in dimensions.items()),
    ]
    return "\n".join(lines)


def _said(
    file: StudyFile, found: Mapping[str, Any], checked: Mapping[str, Any], to: Path
) -> Iterator[str]:
    study = file.study
    yield (
        f"{study.model.source}: {', '.join(found['inputs'])} -> {', '.join(found['targets'])} "
        f"({found['why']}), loss {study.training.loss}; {checked['num_parameters']} parameters, "
        f"{checked['events']} events"
    )
    if FILE in study.data.targets:
        names = [f"{number} in {name}" for number, name in enumerate(study.data.files)]
        yield (
            f"'{FILE}', the number of the file, is what is learned: {', '.join(names)}; "
            "data.file_numbers gives others, and --targets names another field"
        )
    if found["others"]:
        place, _, name = study.model.source.rpartition(":")
        others = [f"{place}:{each}" for each in found["others"]]
        yield f"of several models {name} was taken; there is also {', '.join(others)}"
    if found["left_out"]:
        yield f"left out of {study.data.files[0]}: {found['left_out']}"
    for warning in checked["warnings"]:
        yield f"warning: {warning}"
    yield f"written: {to}"
    typed = shlex.quote(str(to))
    yield f"next: n3lo plan {typed}, then n3lo run {typed}"
