"""What a study measures beside the loss: its own functions, and torchmetrics by name.

Each metric adds up a vector over batches and ranks, exactly, and makes its value from the sum.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from apps.contract import N3LOError, Plain, metric_name
from apps.data import Batch
from apps.frameworks import vision
from apps.losses import (
    Key,
    Pair,
    alike,
    call_own,
    class_numbers,
    mean_of_each,
    own_function,
    pairs,
    shape,
)
from apps.sources import check_arguments, describe, shown_source, source_file

KEY = "training.metrics"
LIBRARY = "torchmetrics"
OF_CLASSES = ("Multiclass", "Multilabel", "Binary")  # whose arguments say how large states are


class Metric:
    """One of `training.metrics`."""

    weighs = False  # whether events may have weights

    def __init__(self, spec: str | Mapping[str, Plain]) -> None:
        settings = {"name": spec} if isinstance(spec, str) else dict(spec)
        self.name = metric_name(spec)
        self._of = settings.get("of")  # one of several targets; None = all

    def sums(self, pairs: Mapping[Key, Pair], weights: Tensor | None = None) -> Tensor:
        """What is added up of a batch, (size,) float64, on its device.

        Args:
            weights: of the events, (B,).
        """
        chosen = pairs
        if self._of is not None:
            if self._of not in pairs:
                there = ", ".join(map(str, pairs))
                raise N3LOError(
                    f"training.metrics: '{self.name}' is of = {self._of!r}, but the targets are "
                    f"{there if None not in pairs else 'one'}"
                )
            chosen = {self._of: pairs[self._of]}
        sums = [self._named_sums(key, *pair, weights) for key, pair in chosen.items()]
        return torch.stack(sums).sum(dim=0)

    @property
    def size(self) -> int:
        """Of the vector that is added up."""
        raise NotImplementedError

    def value(self, sums: Tensor) -> float:
        """Of all events, from the sum over all batches and ranks."""
        raise NotImplementedError

    def _named_sums(
        self, key: Key, outputs: Tensor, targets: Tensor, weights: Tensor | None
    ) -> Tensor:
        """
        Raises:
            N3LOError: it fails; the text names it.
        """
        try:
            return self._sums(key, outputs, targets, weights)
        except torch.OutOfMemoryError:
            raise
        except N3LOError as error:
            if str(error).startswith(KEY):
                raise
            raise N3LOError(f"{KEY}: '{self.name}': {error}") from error
        except Exception as error:  # of a library
            raise N3LOError(
                f"{KEY}: '{self.name}': {describe(error)}; outputs are {shape(outputs)}, targets "
                f"are {shape(targets)}"
            ) from error

    def _sums(self, key: Key, outputs: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        raise NotImplementedError


def make_metric(
    spec: str | Mapping[str, Plain],
    loss_of: Callable[[Key], str],
    example: Callable[[], Batch] | None = None,
) -> Metric:
    """
    Args:
        loss_of: the name of the loss that a target has; it says what outputs mean.
        example: gives events, the same on all ranks, where the size depends on the targets.

    Raises:
        N3LOError: there is no such metric, or it cannot be added up.
    """
    settings = {"name": spec} if isinstance(spec, str) else dict(spec)
    source = settings["name"]
    arguments = {key: value for key, value in settings.items() if key not in ("name", "as", "of")}
    if ":" not in source and source not in METRICS:
        raise N3LOError(
            f"training.metrics: there is no '{source}', only {', '.join(sorted(METRICS))}; "
            f"{_others(source)}"
        )
    if ":" not in source:
        if arguments:
            raise N3LOError(f"training.metrics: '{source}' takes no {', '.join(arguments)}")
        return Mean(spec, METRICS[source])
    where = shown_source("training.metrics", source)
    found = _of_library(source, where) if source.partition(":")[0] == LIBRARY else None
    if found is not None:
        check_arguments(inspect.signature(found), arguments, where)
        made = _constructed(found, arguments, where)
    else:
        made = own_function(source, arguments, "training.metrics")
    if hasattr(made, "_reductions") and hasattr(made, "compute"):
        return States(spec, made, loss_of, example)

    def values_of(outputs: Tensor, targets: Tensor) -> Tensor:
        return _of_events(
            call_own(made, outputs, targets, where, source_file(source)), outputs, where
        )

    return Mean(spec, values_of)


# -- means over events -----------------------------------------------------------------------------


class Mean(Metric):
    """Of values that a function gives for each event; their sum and count are added up.

    With weights these are sum w v and sum w.
    """

    weighs = True

    def __init__(
        self, spec: str | Mapping[str, Plain], function: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        super().__init__(spec)
        self._function = function

    @property
    def size(self) -> int:
        return 2

    def _sums(self, key: Key, outputs: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        values = self._function(outputs, targets)
        if weights is None:
            return torch.stack([values.sum().double(), count_of(values)])
        means, weights = mean_of_each(values.double()), weights.double()
        return torch.stack([(weights * means).sum(), weights.sum()])

    def value(self, sums: Tensor) -> float:
        return (sums[0] / sums[1]).item()


def count_of(values: Tensor) -> Tensor:
    return on_device(values.numel(), values)


def on_device(number: int, like: Tensor) -> Tensor:
    """Made there: a GPU would end all its work before a number is copied to it."""
    return torch.full((), number, dtype=torch.float64, device=like.device)


def _accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Of classes (B, C), or of one logit an event (B,) or (B, 1)."""
    if outputs[0].numel() == 1:
        return (outputs > 0) == (alike(outputs, targets) > 0.5)
    return outputs.argmax(dim=1) == class_numbers(outputs, targets)


def _squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - alike(outputs, targets)).square()


def _absolute_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - alike(outputs, targets)).abs()


METRICS = {"accuracy": _accuracy, "mse": _squared_error, "mae": _absolute_error}


def _of_events(values: Any, outputs: Tensor, where: str) -> Tensor:
    if not isinstance(values, Tensor) or values.ndim == 0 or len(values) != len(outputs):
        given = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise N3LOError(
            f"{where}: gives {given} for a batch; it must have a value for each event, (B,), so "
            "that the mean over all events is exact"
        )
    return values.detach()


# -- torchmetrics ----------------------------------------------------------------------------------


class States(Metric):
    """A metric of torchmetrics whose states are all sums: together they are one vector."""

    def __init__(
        self,
        spec: str | Mapping[str, Plain],
        metric: Any,
        loss_of: Callable[[Key], str],
        example: Callable[[], Batch] | None,
    ) -> None:
        super().__init__(spec)
        self._metric, self._loss_of, self._example = metric, loss_of, example
        self._kind = type(metric).__name__
        self._check_states()
        metric.sync_on_compute = False  # ranks are added up by us
        self._dtypes = {name: each.dtype for name, each in metric._defaults.items()}

    @property
    def size(self) -> int:
        return sum(self._sizes)

    @property
    def _sizes(self) -> list[int]:
        return [each.numel() for each in self._shapes.values()]

    @cached_property
    def _shapes(self) -> dict[str, torch.Size]:
        """Some states grow at the first update to the columns of targets, as those of R2Score."""
        states = self._metric._defaults
        if self._example is not None and not self._kind.startswith(OF_CLASSES):
            targets = self._example().targets
            for key, (target, _) in pairs(targets, targets).items():
                if self._of not in (None, key):
                    continue
                with suppress(Exception):  # what does not suit it is told of true outputs
                    self._update(key, target.float(), target)
                    states = self._metric.metric_state
        return {name: states[name].shape for name in self._dtypes}

    def _check_states(self) -> None:
        """
        Raises:
            N3LOError: the states cannot be added up.
        """
        metric = self._metric
        add = importlib.import_module(f"{LIBRARY}.utilities.data").dim_zero_sum
        lists = [name for name, each in metric._defaults.items() if not isinstance(each, Tensor)]
        others = [name for name, each in metric._reductions.items() if each is not add]
        if lists:
            way_out = "choose another"
            if hasattr(metric, "thresholds"):
                way_out = "set thresholds = 100, which counts events between so many of them"
            raise N3LOError(
                f"training.metrics: '{self._kind}' keeps all outputs ({', '.join(lists)}), which "
                f"would fill the memory of every rank; {way_out}"
            )
        if others or not metric._defaults:
            raise N3LOError(
                f"training.metrics: '{self._kind}' cannot be added up over ranks "
                f"({', '.join(others) or 'it has no state'}); choose one whose states are sums"
            )

    def _sums(self, key: Key, outputs: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        metric, shapes = self._metric, self._shapes  # which the first time may update it
        if metric.device != outputs.device:
            metric.to(outputs.device)
        self._update(key, outputs, targets)
        if hasattr(metric, "validate_args"):
            metric.validate_args = False  # it would have a GPU wait for each batch
        states = [getattr(metric, name).double().flatten() for name in shapes]
        if [len(each) for each in states] != self._sizes:
            raise N3LOError(
                f"training.metrics: '{self._kind}' has states of other sizes for outputs "
                f"{shape(outputs)} than for the first events; of several targets set of = one"
            )
        return torch.cat(states)

    def _update(self, key: Key, outputs: Tensor, targets: Tensor) -> None:
        """Have it hold one batch alone."""
        self._metric.reset()
        self._metric.update(*self._prepared(key, outputs, targets))

    def _prepared(self, key: Key, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """As torchmetrics takes them; whether outputs are logits it would guess, batch by batch."""
        if self._kind.startswith("Multiclass"):
            self._check_number("num_classes", outputs)
            return probabilities(self._loss_of(key), outputs), class_numbers(outputs, targets)
        if self._kind.startswith("Multilabel"):
            self._check_number("num_labels", outputs)
            found = probabilities(self._loss_of(key), outputs, labels=True)
            return found, yes_or_no(alike(outputs, targets))
        if self._kind.startswith("Binary"):
            if outputs.ndim == 2 and outputs.shape[1] == 2:  # that of the second class
                both = probabilities(self._loss_of(key), outputs)
                return both[:, 1], class_numbers(outputs, targets)
            one = probabilities(self._loss_of(key), outputs)
            return one.flatten(), yes_or_no(alike(outputs, targets)).flatten()
        targets = alike(outputs, targets) if outputs.numel() == targets.numel() else targets
        squeezed = outputs.ndim == 2 and outputs.shape[1] == 1
        return (outputs[:, 0], targets[:, 0]) if squeezed else (outputs, targets)

    def _check_number(self, name: str, outputs: Tensor) -> None:
        asked, given = getattr(self._metric, name, None), outputs.shape[1:2]
        if asked is not None and (asked,) != tuple(given):
            raise N3LOError(
                f"training.metrics: '{self._kind}' has {name} = {asked}, but the model gives "
                f"{shape(outputs)}"
            )

    def value(self, sums: Tensor) -> float:
        metric = copy.deepcopy(self._metric).cpu()
        metric.reset()
        values = sums.cpu().split(self._sizes)
        for (name, dtype), part in zip(self._dtypes.items(), values, strict=True):
            exact = torch.float64 if dtype.is_floating_point else dtype
            setattr(metric, name, part.to(exact).reshape(self._shapes[name]))
        metric._update_count = 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of classes without events
            try:
                found = metric.compute()
            except Exception as error:  # of a library
                raise N3LOError(f"training.metrics: '{self._kind}': {describe(error)}") from error
        if not isinstance(found, Tensor) or found.numel() != 1:
            given = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise N3LOError(
                f"training.metrics: '{self._kind}' gives {given} and not one number; set average = "
                "'macro', or choose another"
            )
        return float(found)


def probabilities(loss: str, outputs: Tensor, labels: bool = False) -> Tensor:
    """Where the loss takes logits or logarithms; else outputs as they are.

    With a loss of the user's own ("") they are taken for logits.
    """
    several = outputs.ndim > 1 and outputs.shape[1] > 1
    if loss == "cross_entropy" or (loss == "" and several and not labels):
        return outputs.softmax(dim=1)
    if loss == "nll_loss":
        return outputs.exp()
    of_logits = ("binary_cross_entropy_with_logits", "multilabel_soft_margin_loss")
    return outputs.sigmoid() if loss in (*of_logits, "soft_margin_loss", "") else outputs


def yes_or_no(targets: Tensor) -> Tensor:
    """From 0 and 1, or -1 and 1, to 0 and 1."""
    return (targets > 0.5).long()


def _of_library(source: str, where: str) -> Any:
    """The class of a name, of torchmetrics or its classification, regression, ..."""
    name = source.partition(":")[2]
    vision.watch()  # which torchmetrics imports
    for place in (LIBRARY, *(f"{LIBRARY}.{each}" for each in PARTS)):
        try:
            module = importlib.import_module(place)
        except Exception as error:  # of what it builds upon
            raise N3LOError(f"{where}: {describe(error)}") from error
        if hasattr(module, name):
            return getattr(module, name)
    raise N3LOError(f"{where}: there is no '{name}'; {_others(name)}")


def _others(name: str) -> str:
    """Those of torchmetrics in whose names this one is, or how others are named at all."""
    there: list[str] = []
    with suppress(Exception):  # it may not be installed
        vision.watch()
        for part in PARTS:
            there += vars(importlib.import_module(f"{LIBRARY}.{part}"))
    wanted = name.lower().replace("_", "")
    wanted = "auroc" if wanted in ("auc", "rocauc") else wanted
    found = [
        f"'{LIBRARY}:{each}'" for each in there if each[0].isupper() and wanted in each.lower()
    ]
    if found:
        return f"{LIBRARY} has {', '.join(found[:MOST_OTHERS])}"
    return f"others are named as '{LIBRARY}:MulticlassF1Score' or 'file.py:name'"


MOST_OTHERS = 4  # names in a message
PARTS = ("classification", "regression")


def _constructed(found: Any, arguments: dict[str, Plain], where: str) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it keeps all outputs: refused below
            return found(**arguments)
    except Exception as error:  # a class can raise anything
        raise N3LOError(f"{where}: {describe(error)}") from error
