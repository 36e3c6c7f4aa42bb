"""Whether the outputs of a model, the loss and the targets of all events suit each other."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from apps.contract import N3LOError
from apps.data import Batch, class_of_event
from apps.hdf5 import Field, Index, Reader
from apps.losses import OF_CLASSES, Key, Losses, is_weight, pairs, shape
from apps.transforms import form, tensor_of, transformed

MANY = 2  # outputs for each class there is, of which a warning comes
SUM_TOLERANCE = 1e-3  # of probabilities, which add up to 1
OF_NUMBERS = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
OF_YES_OR_NO = (
    "binary_cross_entropy_with_logits",
    "binary_cross_entropy",
    "multilabel_soft_margin_loss",
)


# -- what it gives, and the loss -------------------------------------------------------------------


def check_outputs(losses: Losses, outputs: Any, targets: Any, num_events: int) -> None:
    """See that outputs are such as the loss takes with these targets.

    Raises:
        N3LOError: they are not.
    """
    losses.check(targets)
    for key, (output, target) in pairs(outputs, targets).items():
        which = "" if key is None else f"output {key!r}: "
        if not isinstance(output, Tensor):
            raise N3LOError(f"{which}forward gives a {type(output).__name__}, not a tensor")
        if output.ndim == 0 or len(output) != num_events:
            raise N3LOError(
                f"{which}forward gives {tuple(output.shape)} for {num_events} events; its first "
                "axis must be that of the events (does squeeze() or mean() take it away?)"
            )
        if not output.is_floating_point():
            raise N3LOError(
                f"{which}forward gives whole numbers ({_type(output)}), which have no gradient; "
                "return what argmax, round or > is taken of"
            )
        wrong = _mismatch(losses.name(key), output, target) or _range(losses.name(key), output)
        if wrong is not None:
            raise N3LOError(which + wrong)


def check_no_weights(outputs: Any, index: Index) -> None:
    """See that no target without an output is the weight of the events.

    Raises:
        N3LOError: one is, by its name.
    """
    targets = keyed(index)
    given = len(outputs) if isinstance(outputs, list | tuple | dict) else 1
    for key, field in targets if given < len(targets) else ():
        name = name_in(key, field)
        if is_weight(name.rpartition("/")[2]):
            raise N3LOError(
                f"data.targets: '{name}' has no output of the model to compare with; where it is "
                f'the weight of the events, take it out and set data.weights = "{field.text}"'
            )


MEAN_TOLERANCE = 1e-3


@torch.no_grad()
def check_mean(losses: Losses, outputs: Any, batch: Batch) -> None:
    """See that an own loss is not the sum over the events.

    Raises:
        N3LOError: it is that of each event alone, added up.
    """
    for key, pair in pairs(outputs, batch.targets).items():
        if losses.name(key) != "":
            continue
        loss, given = losses.of(key), (*pair, batch.weights)
        together = loss(*given)
        try:
            alone = [
                loss(*(None if each is None else each[i : i + 1] for each in given))
                for i in range(batch.num_events)
            ]
        except Exception:  # noqa: BLE001 - a loss of pairs of events may not take one
            continue
        if together != 0 and abs(sum(alone) / together - 1) < MEAN_TOLERANCE:
            which = "" if key is None else f" of {key!r}"
            raise N3LOError(
                f"training.loss{which}: of {batch.num_events} events it is as large as those of "
                "each alone, added up: it is a sum; return the mean over the events, or a value "
                "for each, (B,)"
            )


def _type(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _mismatch(loss: str, output: Tensor, target: Tensor) -> str | None:
    """Of shapes."""
    shapes = f"the model gives {shape(output)}, but the targets are {shape(target)}"
    if loss in OF_CLASSES:
        return _class_mismatch(loss, output, target, shapes)
    if loss == "" or output.numel() == target.numel():
        return None
    each = math.prod(target.shape[1:])
    if each == 1 and loss in OF_YES_OR_NO:
        return (
            f"{shapes}: '{loss}' needs a yes or no for each output; for class numbers take loss = "
            "'cross_entropy', or the step one_hot of data.transforms"
        )
    if each == 1 and loss in OF_NUMBERS and bool((target == target.round()).all()):
        return (
            f"{shapes}: '{loss}' needs a number for each output; for class numbers take loss = "
            "'cross_entropy', for one number give one output"
        )
    return f"{shapes}: '{loss}' needs as many; give {each} output{'s' * (each > 1)}"


def _class_mismatch(loss: str, output: Tensor, target: Tensor, shapes: str) -> str | None:
    width = target.shape[1] if target.ndim > 1 else 1
    if output.ndim > target.ndim + 1 and output.shape[1] == 1:
        return f"{shapes}: '{loss}' needs (B, C); flatten what the model gets, or gives"
    if output.ndim < 2 or output.shape[1] == 1:
        way_out = f"give {width} outputs" if width > 1 else "for yes or no take loss = 'bce'"
        return (
            f"{shapes}: '{loss}' needs an output for each class, (B, C); {way_out}"
            f"{'' if width > 1 else ', for a number mse, or give one output a class'}"
        )
    if target.ndim == output.ndim and width not in (1, output.shape[1]):
        return (
            f"{shapes}, one-hot of {width} classes: give {width} outputs, by model.args or in the "
            "model's file"
        )
    if target.ndim not in (output.ndim, output.ndim - 1):
        return f"{shapes}: '{loss}' needs class numbers, (B,), or one-hot, (B, {output.shape[1]})"
    return None


def _range(loss: str, output: Tensor) -> str | None:
    if loss == "binary_cross_entropy" and (output.min() < 0 or output.max() > 1):
        return (
            "'binary_cross_entropy' takes probabilities, and the model gives numbers outside 0 to "
            "1; end it with a sigmoid, or take loss = 'bce', which has one in it"
        )
    return None


def of_outputs(losses: Losses, outputs: Any, targets: Any) -> Iterator[str]:
    """Warnings where the loss and the end of the model seldom go together.

    Args:
        outputs: with the graph behind them.
    """
    for key, (output, _) in pairs(outputs, targets).items():
        loss, which = losses.name(key), "" if key is None else f" of {key!r}"
        sums = output.detach().sum(dim=1) if output.ndim > 1 else output.detach()
        positive = bool((output >= 0).all())
        ones = output.ndim > 1 and output.shape[1] > 1 and bool(_close(sums))
        if loss == "cross_entropy" and positive and ones:
            yield (
                f"training.loss{which}: 'cross_entropy' takes logits, and the model gives "
                "probabilities (softmax); leave out the softmax, or learning is slow"
            )
        of_logs = output.ndim > 1 and loss in ("nll_loss", "kl_div")
        if of_logs and not bool(_close(output.detach().exp().sum(dim=1))):
            yield (
                f"training.loss{which}: '{loss}' takes log-probabilities, and these are none; end "
                "the model with log_softmax"
                + (", or take loss = 'cross_entropy'" if loss == "nll_loss" else "")
            )
        ends = output.grad_fn.name() if output.grad_fn is not None else ""
        if loss in OF_YES_OR_NO and loss != "binary_cross_entropy" and "Sigmoid" in ends:
            yield (
                f"training.loss{which}: '{loss}' takes logits, and the model ends with a sigmoid; "
                "leave it out, or take loss = 'binary_cross_entropy'"
            )


def _close(sums: Tensor) -> Tensor:
    return ((sums - 1).abs() < SUM_TOLERANCE).all()


# -- the targets of all events ---------------------------------------------------------------------


class Values(NamedTuple):
    """What the finite numbers of a target are, over all events."""

    low: float
    high: float
    whole: bool
    signs: bool  # whether all are -1 or 1
    ones: bool  # whether those of each event, along axis 1, add up to 1, as one-hot


def values_of(index: Index, unless: float | None = None) -> list[Values]:
    """Of each target, as the loss gets it; reads them once, block by block.

    Args:
        unless: a number that does not count.
    """
    members = index.targets.members
    found = [Values(math.inf, -math.inf, True, True, True) for _ in members]
    with closing(Reader(index, members)) as reader:
        for first, end in pairwise(index.block_starts):
            arrays = reader.gather(np.arange(first, end))
            for place, (field, array) in enumerate(zip(members, arrays, strict=True)):
                values = transformed(field, tensor_of(field, array, torch.device("cpu"))).numpy()
                found[place] = _extended(found[place], values, unless)
    return found


def _extended(before: Values, values: np.ndarray, unless: float | None) -> Values:
    ones = before.ones and values.ndim > 1 and bool((values.sum(axis=1) == 1).all())
    values = values[np.isfinite(values)]
    if unless is not None:
        values = values[values != unless]
    if values.size == 0:
        return before
    return Values(
        min(before.low, float(values.min())),
        max(before.high, float(values.max())),
        before.whole and bool((values == np.round(values)).all()),
        before.signs and bool((np.abs(values) == 1).all()),
        ones,
    )


def check_values(losses: Losses, metrics: list[str], outputs: Any, index: Index) -> list[str]:
    """See that the targets of all events are such as the loss takes.

    Returns:
        Warnings, where they are but seldom should be.

    Raises:
        N3LOError: they are not.
    """
    found, warnings = values_of(index), []
    for place, (key, field) in enumerate(keyed(index)):
        loss, values = losses.name(key), found[place]
        output = outputs if isinstance(outputs, Tensor) else outputs[key]
        if "ignore_index" in losses.settings(key):
            values = values_of(index, float(losses.settings(key)["ignore_index"]))[place]
        same = math.prod(output.shape[1:]) == math.prod(form(field)[0])
        wrong = None
        if values.low <= values.high:
            wrong = _wrong_values(loss, values, output, name_in(key, field), same)
            if wrong is None and "accuracy" in metrics and loss not in OF_CLASSES:
                wrong = _wrong_for_accuracy(values, output, same)
                several = loss in OF_YES_OR_NO and math.prod(output.shape[1:]) > 1
                if wrong is None and several and class_of_event(index) is None:
                    wrong = (
                        "holds several yes or no for each event, and training.metrics 'accuracy' "
                        "is of one class; take { name = 'torchmetrics:MultilabelAccuracy', "
                        f"num_labels = {output.shape[1]} }}"
                    )
        if wrong is not None:
            raise N3LOError(f"data.targets: '{name_in(key, field)}' {wrong}")
        classes = int(values.high) + 1 if values.low <= values.high else 0
        if loss in OF_CLASSES and not same and output.shape[1] > MANY * classes:
            warnings.append(
                f"the model gives {output.shape[1]} outputs for the {classes} classes of "
                f"'{name_in(key, field)}': give {classes}, by model.args or in the model's file"
            )
    return warnings


def keyed(index: Index) -> list[tuple[Key, Field]]:
    """The targets, each with its key in what the loss is called with."""
    members = index.targets.members
    if index.targets.kind == "one":
        return [(None, members[0])]
    by_name = index.targets.kind == "table"
    return [(each.name if by_name else place, each) for place, each in enumerate(members)]


def name_in(key: Key, field: Field) -> str:
    """What the study calls a target."""
    return key if isinstance(key, str) else field.text


def _wrong_values(loss: str, values: Values, output: Tensor, name: str, same: bool) -> str | None:
    span = f"holds {values.low:g} to {values.high:g}"
    of_yes_or_no = values.whole and values.low >= 0 and values.high <= 1
    if loss in OF_CLASSES and same and output.shape[1] > 1 and of_yes_or_no and not values.ones:
        return (
            f"has events of several classes, or of none, and '{loss}' is of one for each; for yes "
            "or no to each class take loss = 'bce'"
        )
    if loss in OF_CLASSES and not (same and loss == "cross_entropy" and output.shape[1] > 1):
        return _wrong_classes(loss, values, output.shape[1], name)
    if loss in OF_YES_OR_NO and (values.low < 0 or values.high > 1):
        number = int(values.high) + 1
        return (
            f"{span}, and '{loss}' takes 0 (no) to 1 (yes); for class numbers take loss = "
            f"'cross_entropy' and {number} outputs, for numbers 'mse'"
        )
    if loss == "soft_margin_loss" and not values.signs:
        return f"{span}, and '{loss}' takes -1 (no) and 1 (yes); for 0 and 1 take loss = 'bce'"
    if loss in ("poisson_nll_loss", "kl_div") and values.low < 0:
        what = "counts" if loss == "poisson_nll_loss" else "probabilities"
        return f"{span}, and '{loss}' takes {what}, which are not below 0; take loss = 'mse'"
    return None


def _wrong_classes(loss: str, values: Values, classes: int, name: str) -> str | None:
    span = f"{values.low:g} to {values.high:g}"
    if not values.whole:
        return (
            f"holds {span} and not only whole numbers, and '{loss}' takes class numbers; for "
            "numbers take loss = 'mse'"
        )
    if values.low >= 0 and values.high < classes:
        return None
    if values.low > 0 and values.high - values.low < classes:
        return (
            f"holds the class numbers {span}, and the {classes} outputs are for 0 to "
            f'{classes - 1}: set data.transforms."{name}" = [{{ name = "scale", offset = '
            f"{-values.low:g} }}]"
        )
    if values.low < 0:
        return (
            f"holds the class numbers {span}, which must not be below 0; leave such events out, or "
            f"set loss = {{ name = '{loss}', ignore_index = {values.low:g} }}"
        )
    return (
        f"holds the class numbers {span}, and the {classes} outputs are for 0 to {classes - 1}: "
        f"give {int(values.high) + 1} outputs, by model.args or in the model's file"
    )


def _wrong_for_accuracy(values: Values, output: Tensor, same: bool) -> str | None:
    if not same or (values.low >= 0 and values.high <= 1):
        return None
    return (
        f"holds {values.low:g} to {values.high:g}, of which training.metrics 'accuracy' knows no "
        "right or wrong; take 'mse' or 'mae'"
    )
