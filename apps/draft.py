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

from apps import frameworks
from apps.check import first_events, shapes
from apps.contract import OWN_LOSS, Data, Model, N3LOError, Plain, Training, read_json, write_json
from apps.data import make_batch
from apps.experiment import build_model, call, make_experiment
from apps.formats import Source, open_file, stacked_names
from apps.hdf5 import Index, Reader, index_files
from apps.rows import Jagged
from apps.sources import describe, imported, source_file

CPU = torch.device("cpu")
TRIED_EVENTS = 4  # that the model is called with; BatchNorm needs two
LOOKED_AT = 2000  # targets of which the kind is found out
MOST_TRIES = 60  # of fields as inputs
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
            files (absolute), inputs and targets (names of fields; empty: to be found).

    Raises:
        N3LOError: there is no such model, or nothing in the data fits it.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a few events need no GPU
    torch.set_num_threads(1)
    frameworks.choose_backend()
    torch.manual_seed(1)
    source, make = find_model(request["model"], request["args"])
    own = {**defaults(make), **request["args"]}
    model = build_model(Model(source=source, args=own))
    events, named = Events(request["files"]), (request["inputs"], request["targets"])
    if knows_loss(model):
        trial = own_trial(source, own, events, *named)
    else:
        trial = fitted(source, model, events, *named)
    free = set(own) - set(request["args"]) if isinstance(model, nn.Module) else set()
    return {
        "source": source,
        "args": own,
        "space": Variations(source, own, trial).space(free),
        "fields": {name: _form(shape, dtype) for name, (shape, dtype) in events.fields.items()},
        "events": events.number,
        "inputs": trial.inputs,
        "targets": trial.targets,
        "loss": trial.fit.loss,
        "metrics": list(trial.fit.metrics),
        "why": trial.fit.why,
    }


def _form(shape: Sequence[int], dtype: np.dtype[Any]) -> str:
    """One event's shape and type, as a person writes them."""
    inside = f"{shape[0]}," if len(shape) == 1 else ", ".join(map(str, shape))
    return f"({inside}) {dtype}"


# -- the model -------------------------------------------------------------------------------------


def find_model(wanted: str, args: Mapping[str, Plain]) -> tuple[str, Callable[..., Any]]:
    """The source of a model as a study has it, and what makes it.

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
        return wanted, _complete(shown, name, getattr(module, name), args)
    found = _models(module)
    if not found:
        raise N3LOError(
            f"{shown}: there is no torch.nn.Module class and no function "
            f"{', '.join(FACTORIES[:-1])} in it; name what makes the model, as in "
            f"{Path(place).name}:Name"
        )
    ready = [name for name, make in found.items() if not missing(make, args)]
    if len(found) > 1 and not ready:
        raise N3LOError(
            f"{shown}: {_listed(found)} all need arguments; name one of them, with its arguments, "
            f"as in {Path(place).name}:{next(iter(found))} --arg NAME=VALUE"
        )
    factories = [name for name in FACTORIES if name in ready]
    [chosen, *_] = [*factories, *reversed(ready), *found]
    return f"{place}:{chosen}", _complete(shown, chosen, found[chosen], args)


def _models(module: ModuleType) -> dict[str, Callable[..., Any]]:
    """What in a module makes a model: factories of a usual name, and module classes of its own."""
    return {
        name: value
        for name, value in vars(module).items()
        if getattr(value, "__module__", None) == module.__name__
        and (
            (name in FACTORIES and inspect.isfunction(value))
            or (inspect.isclass(value) and issubclass(value, nn.Module))
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
    samples: dict[str, Sample] = field(default_factory=dict)

    @cached_property
    def fields(self) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        """What has a row for each event: shape of one event and stored type, by name."""
        with open_file(self.files[0]) as file:
            return dict(_datasets(file))

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
            data = Data(files=list(self.files), inputs=text, targets=text)
            self.samples[text] = Sample(text, index_files(data))
        return self.samples[text]


def _datasets(file: Source) -> Iterator[tuple[str, tuple[tuple[int, ...], np.dtype[Any]]]]:
    """Those of numbers that have as many rows as most others, and as many values in each."""
    every = {name: rows for name, rows in file.usable() if not isinstance(rows, N3LOError)}
    found = {
        name: each
        for name, each in every.items()
        if not isinstance(each, Jagged) and each.dtype.kind in "fiub" and len(each.shape) > 0
    }
    lengths = [each.shape[0] for each in found.values()]
    events = max(lengths, key=lengths.count, default=0)
    for name, each in found.items():
        if each.shape[0] == events:
            yield name, (tuple(each.shape[1:]), each.dtype)


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
        outputs, failed = _called(model, values, source)
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
        f"{name} takes {taken}, and an event has {there}; nothing fits"
        f"{': ' + reason if reason else ''}; name them by --inputs and --targets"
    )


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
    called = [each.name.lower() for each in _forward(model)]
    by_name = {name.rpartition("/")[2].lower(): name for name in events.fields}
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


def _called(model: Any, values: Any, source: str) -> tuple[list[torch.Tensor] | None, str]:
    """What the model gives, one tensor with a row an event each; or None, and why not."""
    model.eval()
    try:
        with torch.no_grad():
            is_keras = frameworks.maker_of(model) is not None
            outputs = model(values) if is_keras else call(model, values)
    except Exception as error:  # noqa: BLE001  a user's model can raise anything
        return None, describe(error, source_file(source))
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
    for names in [list(inputs)] if inputs else input_candidates(model, events, targets):
        for named in [list(targets)] if targets else target_candidates(events, names):
            try:
                measured = _judged(source, args, events, names, named)
            except N3LOError as error:
                refused = refused or error
                continue
            fit = Fit(loss=OWN_LOSS, metrics=measured, why="its own loss knows how")
            values = _values([events.sample(each) for each in names])
            return Trial(inputs=names, targets=named, values=values, outputs=[], fit=fit)
    raise refused or N3LOError(f"{source}: the data have nothing to give it")


def _judged(
    source: str, args: Mapping[str, Plain], events: Events, inputs: list[str], targets: list[str]
) -> tuple[str, ...]:
    """What is measured of such a model, after it was called with two events.

    Raises:
        N3LOError: it fails.
    """
    chosen = [names[0] if len(names) == 1 else names for names in (inputs, targets)]
    data = Data(files=list(events.files), inputs=chosen[0], targets=chosen[1])
    batch = first_events(index_files(data))
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
    """Each field that is no input, the likeliest first."""
    used = {part for each in inputs for part in _parts(each)}
    free = [name for name in events.fields if name not in used]
    return [[name] for name in sorted(free, key=lambda name: not is_like(TARGET, name))]


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
