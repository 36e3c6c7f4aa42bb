"""Look at a model and at data, and find out how they go together: what `init` writes is from here.

    python -P -m apps.draft request.json report.json

Needs no MPI. Nothing is trained: the model is called on a few events. Exit status 2 and
{"error": ...} if the user has to mend something.
"""

from __future__ import annotations

import inspect
import itertools
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from apps import frameworks, mistakes
from apps.check import first_events, shapes
from apps.contract import (
    FILE,
    OWN_LOSS,
    Data,
    Model,
    N3LOError,
    Plain,
    Training,
    read_json,
    write_json,
)
from apps.data import make_batch
from apps.experiment import build_model, call, make_experiment
from apps.formats import Source, open_file, stacked_names
from apps.hdf5 import Index, Reader, index_files
from apps.rows import Jagged, Rows
from apps.sources import describe, imported, source_file

Form = tuple[tuple[int, ...], np.dtype[Any]]  # shape of one event, and stored type

CPU = torch.device("cpu")
TRIED_EVENTS = 4  # that the model is called with; BatchNorm needs two
LOOKED_AT = 2000  # targets of which the kind is found out
MOST_TRIES = 60  # of fields as inputs
MOST_REASONS = 5  # in a message
VARYING_S = 20.0  # for trying arguments of the model
LARGE = 5_000_000  # parameters; what is wider still takes memory
VERY_LARGE = 50_000_000

FACTORIES = ("get_model", "build_model", "make_model", "model")
TARGET = re.compile(r"(y|labels?|targets?|class(es)?|truth)([_\d].*)?|is_.*", re.IGNORECASE)
INPUT = re.compile(r"(x|features?|inputs?|data|images?)([_\d].*)?", re.IGNORECASE)


def main() -> None:
    request, report = read_json(Path(sys.argv[1])), Path(sys.argv[2])
    try:
        write_json(report, draft(request))
    except N3LOError as error:
        write_json(report, {"error": str(error)})
        sys.exit(2)


def draft(request: Mapping[str, Any]) -> dict[str, Any]:
    """What a study of this model and these data would say.

    Args:
        request: model ("file.py", "file.py:Name" or "package.module:Name"), args (of the model),
            files (absolute), file_numbers (what "@file" is in each; None where that is nothing to
            learn), inputs and targets (names of fields; empty: to be found).

    Raises:
        N3LOError: there is no such model, or nothing in the data fits it.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a few events need no GPU
    torch.set_num_threads(1)
    frameworks.choose_backend()
    torch.manual_seed(1)
    source, make, others = find_model(request["model"], request["args"])
    own = {**defaults(make), **request["args"]}
    model = build_model(Model(source=source, args=own))
    events = Events(request["files"], request.get("file_numbers"))
    named = request["inputs"], request["targets"]
    frames = "" if all(named) else events.remedy
    if frames and not events.fields:
        raise N3LOError(f"{request['files'][0]}: {frames}")
    if knows_loss(model):
        trial = own_trial(source, own, events, *named)
    else:
        mistakes.check_weights(model, source.rpartition(":")[2])
        trial = fitted(source, model, events, *named)
    free = set(own) - set(request["args"]) if isinstance(model, nn.Module) else set()
    return {
        "source": source,
        "others": others,
        "args": own,
        "space": Variations(source, own, trial).space(free),
        "fields": {name: _form(shape, dtype) for name, (shape, dtype) in events.fields.items()},
        "events": events.number,
        "left_out": frames,
        "keys": trial.keys,
        "inputs": trial.inputs,
        "targets": trial.targets,
        "loss": trial.fit.loss,
        "optimizer": frameworks.compiled_optimizer(model),
        "metrics": list(trial.fit.metrics),
        "why": trial.fit.why,
    }


def _form(shape: Sequence[int], dtype: np.dtype[Any]) -> str:
    """One event's shape and type, as a person writes them."""
    inside = f"{shape[0]}," if len(shape) == 1 else ", ".join(map(str, shape))
    return f"({inside}) {dtype}"


# -- the model -------------------------------------------------------------------------------------


def find_model(wanted: str, args: Mapping[str, Plain]) -> tuple[str, Callable[..., Any], list[str]]:
    """The source of a model as a study has it, what makes it, and what else could be meant.

    Of several in a file: a factory of a usual name, or else the last module class whose arguments
    are all known.

    Raises:
        N3LOError: there is none, or several that could be meant.
    """
    place, _, name = wanted.partition(":")
    shown = f"'{Path(place).name if place.endswith('.py') else wanted}'"
    module = imported(place, shown)
    if name:
        if not hasattr(module, name):
            raise N3LOError(f"{shown}: there is no '{name}', only {_listed(_models(module))}")
        return wanted, _complete(shown, name, getattr(module, name), args), []
    found = _models(module)
    if not found:
        made = [name for name, value in vars(module).items() if isinstance(value, nn.Module)]
        raise N3LOError(
            f"{shown}: there is no class of torch.nn.Module or keras.Model and no function "
            f"{', '.join(FACTORIES[:-1])} in it; "
            + (
                f"'{made[-1]}' is a model, and each training makes one anew: make it in a function "
                f"get_model that returns it"
                if made
                else f"name what makes the model, as in {Path(place).name}:Name"
            )
        )
    ready = [name for name, make in found.items() if not missing(make, args)]
    if len(found) > 1 and not ready:
        raise N3LOError(
            f"{shown}: {_listed(found)} all need arguments; name one of them, with its arguments, "
            f"as in {Path(place).name}:{next(iter(found))} --arg NAME=VALUE"
        )
    factories = [name for name in FACTORIES if name in ready]
    [chosen, *_] = [*factories, *reversed(ready), *found]
    others = [name for name in ready if name != chosen]
    return f"{place}:{chosen}", _complete(shown, chosen, found[chosen], args), others


def _models(module: ModuleType) -> dict[str, Callable[..., Any]]:
    """What in a module makes a model: factories of a usual name, and module classes of its own."""
    return {
        name: value
        for name, value in vars(module).items()
        if getattr(value, "__module__", None) == module.__name__
        and (
            (name in FACTORIES and inspect.isfunction(value))
            or (
                inspect.isclass(value)
                and issubclass(value, nn.Module)
                and not frameworks.is_layer(value)
            )
        )
    }


def _listed(found: Mapping[str, Any]) -> str:
    return ", ".join(found) or "none that makes a model"


def _parameters(make: Callable[..., Any]) -> list[inspect.Parameter]:
    """Those that a name may be given for."""
    try:
        parameters = inspect.signature(make).parameters.values()
    except ValueError:  # of C
        return []
    return [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]


def missing(make: Callable[..., Any], args: Mapping[str, Plain]) -> list[str]:
    """The arguments without a default that are not given."""
    return [
        each.name
        for each in _parameters(make)
        if each.default is each.empty and each.name not in args
    ]


def defaults(make: Callable[..., Any]) -> dict[str, Plain]:
    """The defaults that a study can write down."""
    return {
        each.name: list(each.default) if isinstance(each.default, tuple) else each.default
        for each in _parameters(make)
        if _is_plain(each.default)
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return len(value) > 0 and all(_is_plain(each) for each in value)
    return isinstance(value, bool | int | str) or (isinstance(value, float) and np.isfinite(value))


def _complete(
    shown: str, name: str, make: Callable[..., Any], args: Mapping[str, Plain]
) -> Callable[..., Any]:
    lacking = missing(make, args)
    if lacking:
        example = " ".join(f"--arg {each}=VALUE" for each in lacking)
        raise N3LOError(f"{shown}: {name} needs {', '.join(lacking)}; add {example}")
    return make


# -- the data --------------------------------------------------------------------------------------


@dataclass
class Events:
    """Fields of the data files, read as a study's would be; each once."""

    files: Sequence[str]
    file_numbers: Sequence[float] | None = None  # of which "@file" may be a target
    samples: dict[str, Sample] = field(default_factory=dict)

    @cached_property
    def _found(self) -> tuple[dict[str, Form], list[str], str]:
        with open_file(self.files[0]) as file:
            return (*_datasets(file), file.remedy())

    @property
    def fields(self) -> dict[str, Form]:
        """What has a row for each event: shape of one event and stored type, by name."""
        return self._found[0]

    @property
    def left_out(self) -> list[str]:
        """What else there is, each with the reason."""
        return self._found[1]

    @property
    def remedy(self) -> str:
        """What to do first with such files; or nothing."""
        return self._found[2]

    @property
    def number(self) -> int:
        """Of all files together."""
        return next(iter(self.samples.values())).index.num_events

    def sample(self, text: str) -> Sample:
        """A field as the model gets it, and as the loss does.

        Raises:
            N3LOError: there is no such field, or it is not one of numbers.
        """
        if text not in self.samples:
            self.samples[text] = Sample(text, index_files(self.data(text, text)))
        return self.samples[text]

    def data(self, inputs: Any, targets: Any) -> Data:
        """As a study has them."""
        numbers = self.file_numbers and list(self.file_numbers)
        return Data(files=list(self.files), file_numbers=numbers, inputs=inputs, targets=targets)


def _datasets(file: Source) -> tuple[dict[str, Form], list[str]]:
    """Those of numbers that have as many rows as most others, and as many values in each.

    Of the others, why not.
    """
    found: dict[str, Rows] = {}
    reasons: list[str] = []
    jagged: list[str] = []
    for name, rows in file.usable():
        if isinstance(rows, N3LOError):
            reasons.append(str(rows).removeprefix(f"{file.filename}: "))
        elif isinstance(rows, Jagged):
            jagged.append(name)
        else:
            found[name] = rows
    if jagged:
        reasons.append(f"events of different lengths, as {jagged[0]} (name '{jagged[0]}[:, :10]')")
    lengths = [len(each) for each in found.values()]
    events = max(lengths, key=lengths.count, default=0)
    reasons += [
        f"'{name}' has {len(each)} events, and others have {events}"
        for name, each in found.items()
        if len(each) != events
    ]
    fitting = {name: each for name, each in found.items() if len(each) == events}
    return {name: (tuple(each.shape[1:]), each.dtype) for name, each in fitting.items()}, reasons


@dataclass(frozen=True)
class Sample:
    """Some events of a field."""

    text: str
    index: Index  # with the field as the inputs, and as the targets

    @cached_property
    def inputs(self) -> Any:
        """As the model gets it: (TRIED_EVENTS, ...)."""
        return self._batch(TRIED_EVENTS).inputs

    @cached_property
    def targets(self) -> Any:
        """As the loss gets it, of events from all over the files: (LOOKED_AT, ...)."""
        return self._batch(LOOKED_AT).targets

    @property
    def target_shape(self) -> tuple[int, ...] | None:
        """Of one event; None of a group."""
        fields = self.index.targets
        return fields.members[0].shape if fields.kind == "one" else None

    def _batch(self, most: int) -> Any:
        events = np.unique(np.linspace(0, self.index.num_events - 1, most).astype(np.int64))
        arrays = Reader(self.index, self.index.fields).gather(events)
        return make_batch(self.index, arrays, len(events), CPU)


# -- how they go together --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The loss by which an output of the model and targets go together."""

    loss: str
    metrics: tuple[str, ...] = ()
    why: str


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Inputs that the model takes, and targets that are like what it gives."""

    inputs: list[str]
    targets: list[str]
    values: Any  # of the inputs
    outputs: list[torch.Tensor]
    fit: Fit
    keys: tuple[Sequence[str], Sequence[str]] = ((), ())  # of tables of inputs and of outputs


def fitted(
    source: str, model: Any, events: Events, inputs: Sequence[str], targets: Sequence[str]
) -> Trial:
    """The first fields that fit; those that are named are taken as they are.

    Raises:
        N3LOError: none do; the text says what the model takes and what there is.
    """
    name = source.rpartition(":")[2]
    reason = ""
    for names in [list(inputs)] if inputs else input_candidates(model, events, targets):
        samples = [events.sample(each) for each in names]
        values = _values(samples)
        outputs, failed = _called(model, values, source, names)
        if outputs is None:
            reason = reason or f"{', '.join(names)} as {_shapes(samples)}: {failed}"
            continue
        chosen = fit_targets(outputs, events, names, targets)
        if chosen is not None:
            found, fit = chosen
            return Trial(inputs=names, targets=found, values=values, outputs=outputs, fit=fit)
        gives = ", ".join(_batch_shape(each) for each in outputs)
        reason = f"{name} takes {', '.join(names)} and gives {gives}, and nothing is like that"
        if targets:
            reason = (
                f"{name} gives {gives}, and {', '.join(targets)} is {_targets(events, targets)}"
            )
    taken = ", ".join(each.name for each in _forward(model)) or "anything"
    there = ", ".join(f"{each} {_form(*of)}" for each, of in events.fields.items())
    raise N3LOError(
        f"{name} takes {taken}, and an event has {there or 'no array of numbers'}; nothing fits"
        f"{': ' + reason if reason else ''}{_left_out(events)}; "
        f"name them by --inputs and --targets{_as_one_input(model, events, inputs, source)}"
    )


def _left_out(events: Events) -> str:
    reasons = events.left_out
    more = f" and {len(reasons) - MOST_REASONS} more" if len(reasons) > MOST_REASONS else ""
    return f"; not usable: {'; '.join(reasons[:MOST_REASONS])}{more}" if reasons else ""


def _as_one_input(model: Any, events: Events, inputs: Sequence[str], source: str) -> str:
    """How to name columns as one input, of as many as a model of one argument takes."""
    columns = [
        name
        for name, (shape, _) in events.fields.items()
        if not shape and (name in inputs if inputs else not is_like(TARGET, name))
    ]
    if len(_forward(model)) != 1 or len(columns) < 2:
        return ""
    if not inputs:
        numbers = range(2, min(len(columns), MOST_TRIES) + 1)
        stacks = [f"({', '.join(columns[:number])})" for number in numbers]
        fitting = next((each for each in stacks if _takes(model, events, each, source)), None)
        if fitting is None:
            return ""
        return f'; it takes {fitting.count(",") + 1} columns as one, as in --inputs "{fitting}"'
    return f'; several columns are one input in parentheses: --inputs "({", ".join(inputs)})"'


def _takes(model: Any, events: Events, text: str, source: str) -> bool:
    try:
        values = events.sample(text).inputs
    except N3LOError:
        return False
    return _called(model, values, source)[0] is not None


def _values(samples: Sequence[Sample]) -> Any:
    return samples[0].inputs if len(samples) == 1 else [each.inputs for each in samples]


def _shapes(samples: Sequence[Sample]) -> str:
    return ", ".join(shapes(each.index.inputs) for each in samples)


def _targets(events: Events, names: Sequence[str]) -> str:
    return ", ".join(shapes(events.sample(each).index.targets) for each in names)


def _batch_shape(outputs: torch.Tensor) -> str:
    return f"({', '.join(['B', *map(str, outputs.shape[1:])])})"


def _forward(model: Any) -> list[inspect.Parameter]:
    """What the model is called with and cannot do without."""
    takes = getattr(model, "forward", None)  # networks that are trained in turn have none
    return [each for each in _parameters(takes) if each.default is each.empty] if takes else []


def input_candidates(model: Any, events: Events, targets: Sequence[str]) -> Iterator[list[str]]:
    """Fields that the model may be meant for, the likeliest first."""
    free = [name for name in events.fields if name not in targets and not is_like(TARGET, name)]
    names = frameworks.names_in(model, "input") or [each.name for each in _forward(model)]
    called = [each.lower() for each in names]
    by_name = _by_name(events)
    number = len(getattr(model, "inputs", None) or called) or 1  # a Keras model has a list of them
    found = []
    if len(called) == number and by_name.keys() >= set(called):
        found.append([by_name[each] for each in called])
    if number == 1:
        larger = sorted(free, key=lambda name: -len(events.fields[name][0]))
        found += [[name] for name in sorted(larger, key=lambda name: not is_like(INPUT, name))]
        found += [[each] for each in _stacks([name for name in free if not events.fields[name][0]])]
    else:
        found += [list(names) for names in itertools.permutations(free, number)][:MOST_TRIES]
    yield from found[:MOST_TRIES]


def _by_name(events: Events) -> dict[str, str]:
    """The fields by the last parts of their names, in small letters; of several the shortest."""
    names = sorted(events.fields, key=len, reverse=True)
    return {name.rpartition("/")[2].lower(): name for name in names}


def _stacks(columns: Sequence[str]) -> Iterator[str]:
    """Columns as one input: all, and without the last or the first, which may be the target."""
    for part in (columns, columns[:-1], columns[1:]):
        if len(part) > 1:
            yield f"({', '.join(part)})"


def is_like(pattern: re.Pattern[str], name: str) -> bool:
    """Whether the last part of a field's name is one that is usual for targets, or inputs."""
    return pattern.fullmatch(name.rpartition("/")[2]) is not None


def knows_loss(model: Any) -> bool:
    """Whether it is a module of Lightning, or a compiled model of Keras, or trains itself."""
    if not isinstance(model, nn.Module):
        return True
    return frameworks.maker_of(model) is not None and getattr(model, "compiled", True)


def _called(
    model: Any, values: Any, source: str, names: Sequence[str] = ()
) -> tuple[list[torch.Tensor] | None, str]:
    """What the model gives, one tensor with a row an event each; or None, and why not."""
    model.eval()
    watch, is_keras = mistakes.Watch(model), frameworks.maker_of(model) is not None
    try:
        with torch.no_grad(), watch.watching():
            outputs = model(values) if is_keras else call(model, values)
    except (Exception, SystemExit) as error:  # noqa: BLE001  a user's model can raise anything
        reason = None if is_keras else mistakes.explain(watch, names, values)
        return None, reason or describe(error, source_file(source))
    outputs = list(outputs) if isinstance(outputs, list | tuple) else [outputs]
    parts = list(values.values()) if isinstance(values, dict) else values
    number = len(parts[0] if isinstance(parts, list) else parts)
    for each in outputs:
        if not isinstance(each, torch.Tensor) or each.ndim == 0 or len(each) != number:
            return None, "it does not give a tensor with a row for each event"
    return outputs, ""


def fit_targets(
    outputs: Sequence[torch.Tensor],
    events: Events,
    inputs: Sequence[str],
    named: Sequence[str],
) -> tuple[list[str], Fit] | None:
    """A field for each output, all by the same loss; None if there are no such fields."""
    free = list(named) or [name for [name] in target_candidates(events, inputs)]
    chosen: list[str] = []
    fits: list[Fit] = []
    for output in outputs:
        fitting = ((name, fit(output, events.sample(name))) for name in free if name not in chosen)
        found = next(((name, each) for name, each in fitting if each is not None), None)
        if found is None:
            return None
        chosen.append(found[0])
        fits.append(found[1])
    if len({each.loss for each in fits}) > 1 or (named and len(named) != len(chosen)):
        return None
    return chosen, fits[0]


def _parts(text: str) -> list[str]:
    """The fields that the text of a study names: one, or several as one."""
    dataset = text.partition("[")[0]
    return [dataset, *(stacked_names(dataset) or [])]


def own_trial(
    source: str, args: Mapping[str, Plain], events: Events, inputs: Sequence[str], targets: Any
) -> Trial:
    """Of a model that knows its loss: the first fields with which it can be judged.

    Raises:
        N3LOError: there are none; the text is that of the first that were tried.
    """
    refused: N3LOError | None = None
    model = build_model(Model(source=source, args=dict(args)))
    keys = frameworks.keys_of(model, "input"), frameworks.keys_of(model, "output")
    for names in [list(inputs)] if inputs else input_candidates(model, events, targets):
        alike = _named_like(frameworks.names_in(model, "output"), events, names)
        for named in [list(targets)] if targets else [*alike, *target_candidates(events, names)]:
            try:
                chosen = as_study(names, keys[0]), as_study(named, keys[1])
                measured = _judged(source, args, events, *chosen)
            except N3LOError as error:
                refused = refused or error
                continue
            fit = Fit(loss=OWN_LOSS, metrics=measured, why="its own loss knows how")
            samples = [events.sample(each) for each in names]
            values = _values(samples)
            if isinstance(chosen[0], dict):
                values = {key: each.inputs for key, each in zip(keys[0], samples, strict=True)}
            return Trial(inputs=names, targets=named, values=values, outputs=[], fit=fit, keys=keys)
    raise refused or N3LOError(f"{source}: the data have nothing to give it")


def _named_like(outputs: Sequence[str], events: Events, inputs: Sequence[str]) -> list[list[str]]:
    """The fields with the names of all outputs, if there are such."""
    by_name = {name: field for name, field in _by_name(events).items() if field not in inputs}
    called = [each.lower() for each in outputs]
    return [[by_name[each] for each in called]] if called and by_name.keys() >= set(called) else []


def as_study(names: Sequence[str], keys: Sequence[str]) -> Any:
    """Fields as `data.inputs` and `data.targets` have them: a table, where the model has one."""
    if len(names) == len(keys):
        return dict(zip(keys, names, strict=True))
    return names[0] if len(names) == 1 else list(names)


def _judged(
    source: str, args: Mapping[str, Plain], events: Events, inputs: Any, targets: Any
) -> tuple[str, ...]:
    """What is measured of such a model, after it was called with two events.

    Raises:
        N3LOError: it fails.
    """
    batch = first_events(index_files(events.data(inputs, targets)))
    training = Training(loss=OWN_LOSS)
    try:
        experiment = make_experiment(Model(source=source, args=dict(args)), training, lambda: batch)
        with torch.no_grad():
            experiment.evaluate(batch)
    except N3LOError:
        raise
    except Exception as error:  # a user's model can raise anything
        raise N3LOError(f"{source}: {describe(error, source_file(source))}") from error
    return tuple(experiment.measured)


def target_candidates(events: Events, inputs: Sequence[str]) -> list[list[str]]:
    """Each field that is no input, the likeliest first: by its name, or else the file."""
    used = {part for each in inputs for part in _parts(each)}
    free = [name for name in events.fields if name not in used]
    named = [name for name in free if is_like(TARGET, name)]
    of_file = [FILE] if events.file_numbers is not None else []
    return [[name] for name in (*named, *of_file, *(each for each in free if each not in named))]


def fit(output: torch.Tensor, sample: Sample) -> Fit | None:
    """The loss for outputs (B, ...) and a field, by shapes and values; None if they do not fit."""
    shape, one = tuple(output.shape[1:]), sample.target_shape
    if one is None:
        return None
    if shape in ((), (1,)) and one in ((), (1,)):
        return _of_a_number(sample.targets)
    if len(shape) == 1 and one == () and not sample.targets.is_floating_point():
        return _of_class_numbers(shape[0], sample.targets, output)
    if shape != one:
        return None
    is_binary = _is_binary(sample.targets)
    if len(shape) == 1 and is_binary and bool((sample.targets.sum(dim=1) == 1).all()):
        why = f"{shape[0]} classes, one-hot"
        return Fit(loss="cross_entropy", metrics=("accuracy",), why=why)
    if is_binary:
        why = f"{' x '.join(map(str, shape))} labels of 0 and 1, several at once"
        return Fit(loss="binary_cross_entropy_with_logits", why=why)
    return Fit(loss="mse_loss", metrics=("mae",), why="numbers")


def _of_a_number(targets: torch.Tensor) -> Fit:
    if _is_binary(targets):
        why = "0 and 1, from one logit"
        return Fit(loss="binary_cross_entropy_with_logits", metrics=("accuracy",), why=why)
    return Fit(loss="mse_loss", metrics=("mae",), why="a number")


def _of_class_numbers(num_classes: int, targets: torch.Tensor, output: torch.Tensor) -> Fit | None:
    if int(targets.min()) < 0 or int(targets.max()) >= num_classes:
        return None
    are_logs = bool(torch.allclose(output.exp().sum(dim=1), torch.ones(len(output))))
    loss = "nll_loss" if are_logs else "cross_entropy"
    return Fit(loss=loss, metrics=("accuracy",), why=f"class numbers 0 to {num_classes - 1}")


def _is_binary(targets: torch.Tensor) -> bool:
    return bool(((targets == 0) | (targets == 1)).all())


# -- what can be searched --------------------------------------------------------------------------


@dataclass
class Variations:
    """Arguments of the model that can be other than they are: each is tried on the same events."""

    source: str
    args: dict[str, Plain]
    trial: Trial
    until: float = field(default_factory=lambda: time.monotonic() + VARYING_S)

    def space(self, names: set[str]) -> dict[str, dict[str, Plain]]:
        """Dimensions for some of the arguments; none for those of which others do not fit."""
        found = {}
        for name, value in self.args.items():
            if name in names and type(value) in (int, float) and self._seconds_left > 0:
                dimension = self._number(name) if type(value) is int else self._share(name)
                if dimension is not None:
                    found[name] = dimension
        return found if found and self._go_together(found) else {}

    @property
    def _seconds_left(self) -> float:
        return self.until - time.monotonic()

    def _number(self, name: str) -> dict[str, Plain] | None:
        """Around the default: a factor, in octaves where it is large."""
        value = int(self.args[name])
        size = self._parameters
        if value < 1 or size > VERY_LARGE:
            return None
        factor = 4 if value >= 8 and size < LARGE else 2
        low, high = max(1, value // factor), value * factor
        if not (self._fits({name: low}) and self._fits({name: high})):
            return None
        if not all(self._fits({name: each}) for each in (low + 1, value + 1)):
            values = [each for each in (low, value, high) if self._fits({name: each})]
            return {"type": "choice", "values": list(dict.fromkeys(values))}
        log = {"log": True} if value >= 8 else {}
        return {"type": "int", "low": low, "high": high, **log}

    def _share(self, name: str) -> dict[str, Plain] | None:
        """Of a float between 0 and 1, such as that of dropout."""
        value = float(self.args[name])
        if not 0.01 <= value < 1:
            return None
        high = max(0.5, round((1 + value) / 2, 3))
        fits = self._fits({name: 0.0}) and self._fits({name: high})
        return {"type": "real", "low": 0.0, "high": high} if fits else None

    def _go_together(self, space: Mapping[str, Mapping[str, Any]]) -> bool:
        ends = {
            name: (each["values"][0], each["values"][-1])
            if "values" in each
            else (each["low"], each["high"])
            for name, each in space.items()
        }
        return all(self._fits({name: end[side] for name, end in ends.items()}) for side in (0, 1))

    @cached_property
    def _parameters(self) -> int:
        model = build_model(Model(source=self.source, args=self.args))
        return sum(each.numel() for each in model.parameters() if not is_lazy(each))

    def _fits(self, changed: Mapping[str, Plain]) -> bool:
        """Whether the model still takes the inputs, and gives what it gave in shape."""
        try:
            model = build_model(Model(source=self.source, args={**self.args, **changed}))
        except N3LOError:
            return False
        outputs, _ = _called(model, self.trial.values, self.source)
        before = [each.shape for each in self.trial.outputs]
        is_known = len(before) > 0  # not of a model that is judged by a loss of its own
        return outputs is not None and (not is_known or [each.shape for each in outputs] == before)


if __name__ == "__main__":
    main()
