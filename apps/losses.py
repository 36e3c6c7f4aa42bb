"""The losses that a study can name; each is a mean over the events of a batch.

Ranks are averaged by their numbers of events, so nothing else would give the loss of all events.
Of events with weights it is (1/B) sum_i w_i l_i, where the mean of w over the training events is 1:
hence still a mean over events, for any sizes of batches.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache, partial, reduce
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from apps.contract import OWN_LOSS, N3LOError, Plain, Training
from apps.sources import (
    check_arguments,
    choose,
    describe,
    load_object,
    shown_source,
    signature_of,
    source_file,
)

T = TypeVar("T")

Pair = tuple[Tensor, Tensor]  # outputs and targets, (B, ...) each
Key = int | str | None  # of one of several targets: its place in a list, or its name in a table
Loss = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # of outputs, targets, weights

OF_CLASSES = ("cross_entropy", "nll_loss", "multi_margin_loss")  # (B, C) against numbers of classes
LOSSES = (
    *OF_CLASSES,
    *("binary_cross_entropy_with_logits", "binary_cross_entropy"),
    *("soft_margin_loss", "multilabel_soft_margin_loss"),
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"),
    *("poisson_nll_loss", "kl_div"),
)
LOSS_ALIASES = {"mse": "mse_loss", "mae": "l1_loss", "bce": "binary_cross_entropy_with_logits"}
WEIGHTS = "weights"  # how an own loss asks for those of the events
NOT_TO_SET = ("input", "target", "size_average", "reduce", "reduction")


class Losses:
    """The loss of a study: of one target, or summed over several, each with its weight."""

    def __init__(self, training: Training) -> None:
        """
        Raises:
            N3LOError: a loss or one of its arguments does not exist.
        """
        if training.loss == OWN_LOSS:
            raise N3LOError(
                "training.loss: 'own' is for models that bring their losses (apps.adversarial), "
                "and this one is a module; name a loss, such as 'cross_entropy' or 'mse'"
            )
        self._settings = _of_each(training.loss, settings_of)
        self._losses = _of_each(training.loss, make_loss)
        self._weights = training.loss_weights

    def __call__(self, outputs: Any, targets: Any, weights: Tensor | None = None) -> Tensor:
        """The mean over the events of what the model gives, (B, ...), or of several such.

        Args:
            weights: of the events, (B,), by which their losses are multiplied.
        """
        losses = []
        for key, (output, target) in pairs(outputs, targets).items():
            loss = self.of(key)(output, target, weights)
            if self._weights is not None:
                loss = loss * _at(self._weights, key, "training.loss_weights")
            losses.append(loss)
        return reduce(torch.add, losses)

    def of(self, key: Key) -> Loss:
        """That of one of the targets."""
        found: Loss = _at(self._losses, key, "training.loss")
        return found

    def check(self, targets: Any) -> None:
        """See that there are as many losses and weights as targets.

        Raises:
            N3LOError: there are not.
        """
        keys = list(_by_key(targets))
        for name, given in (("loss", self._losses), ("loss_weights", self._weights)):
            there: list[Key] = [None]
            if isinstance(given, list | dict):
                there = list(_by_key(given))
            elif given is None or callable(given):
                continue
            if set(there) != set(keys):
                raise N3LOError(
                    f"training.{name}: is for {_said(there)}, and data.targets has {_said(keys)}"
                )

    @property
    def names(self) -> list[str]:
        """Of all targets, as `name` has them."""
        one = "name" in self._settings
        return [each["name"] for each in ([self._settings] if one else _values(self._settings))]

    def name(self, key: Key) -> str:
        """Which loss one of the targets has, by its name in torch; "" of a user's own."""
        return str(self.settings(key)["name"])

    def settings(self, key: Key) -> dict[str, Plain]:
        """The name and the arguments of the loss that one of the targets has."""
        one = "name" in self._settings
        return self._settings if one else _at(self._settings, key, "training.loss")


def pairs(outputs: Any, targets: Any) -> dict[Key, Pair]:
    """Outputs with their targets; several where the targets are a list or a table.

    Raises:
        N3LOError: they have not the same form.
    """
    if isinstance(targets, list) and len(targets) == 1 and isinstance(outputs, Tensor):
        outputs = [outputs]
    of_outputs, of_targets = _by_key(outputs), _by_key(targets)
    one = isinstance(targets, Tensor) and isinstance(outputs, Tensor)
    tables = isinstance(targets, dict) and isinstance(outputs, dict)
    lists = isinstance(targets, list) and isinstance(outputs, list | tuple)
    if not (one or tables or lists) or of_outputs.keys() != of_targets.keys():
        one_target = isinstance(targets, Tensor)
        wanted = "return what the loss is of, and nothing else" if one_target else "return as many"
        way_out = f"let forward {wanted}"
        if "aux_logits" in "".join(getattr(outputs, "_fields", ())):  # of torchvision's Inceptions
            way_out = "set aux_logits = false in model.args"
        raise N3LOError(
            f"the model gives {form(outputs)}, but the targets are {form(targets)}: {way_out}"
        )
    return {key: (of_outputs[key], target) for key, target in of_targets.items()}


def make_loss(spec: str | Mapping[str, Plain]) -> Loss:
    """One loss of a study, by its name or as a table with arguments."""
    settings = {"name": spec} if isinstance(spec, str) else dict(spec)
    name = settings.pop("name")
    return _own(name, settings) if ":" in name else _of_torch(name, settings)


def class_numbers(outputs: Tensor, targets: Tensor) -> Tensor:
    """Numbers of classes, (B, ...) int64, from these in any type, also as (B, 1), or one-hot."""
    if targets.ndim == outputs.ndim and targets.shape[1] == 1 < outputs.shape[1]:
        targets = targets.squeeze(1)
    return targets.argmax(dim=1) if targets.ndim == outputs.ndim else targets.long()


def alike(outputs: Tensor, targets: Tensor) -> Tensor:
    """Targets in the shape and type of the outputs; (B,) against (B, 1) would become (B, B)."""
    ours, theirs = ([size for size in each.shape[1:] if size != 1] for each in (outputs, targets))
    crossed = ours != theirs and len(ours) > 1 and len(theirs) > 1  # what is flat keeps its order
    if outputs.numel() != targets.numel() or crossed:
        raise N3LOError(f"the model gives {shape(outputs)}, but the targets are {shape(targets)}")
    return targets.reshape(outputs.shape).to(outputs.dtype)


def mean_of_each(values: Tensor) -> Tensor:
    """Of each event, (B,), from (B, ...)."""
    return values.reshape(len(values), -1).mean(dim=1)


def shape(tensor: Tensor) -> str:
    inside = ", ".join(["B", *map(str, tensor.shape[1:])])
    return f"({inside})" if tensor.ndim > 1 else "(B,)"


def form(value: Any) -> str:
    if isinstance(value, dict):
        return f"a table of {', '.join(map(str, value))}"
    if hasattr(value, "_fields"):
        return f"a {type(value).__name__} of {', '.join(value._fields)}"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    return "one tensor" if isinstance(value, Tensor) else f"a {type(value).__name__}"


# -- one loss --------------------------------------------------------------------------------------


def _of_torch(name: str, settings: dict[str, Plain]) -> Loss:
    name = choose("training.loss", name, {each: each for each in LOSSES} | LOSS_ALIASES)
    function = getattr(functional, name)
    signature = inspect.signature(function)
    free = [each for key, each in signature.parameters.items() if key not in NOT_TO_SET]
    what = f"training.loss '{name}'"
    check_arguments(signature.replace(parameters=free), settings, what)
    # Of weighted classes torch takes the mean over the weights, which ranks could not average.
    of_events = "weight" in settings or "ignore_index" in settings
    mean = "batchmean" if name == "kl_div" else "mean"
    on = _arguments(what, settings)

    def loss(outputs: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        targets = _targets(name, outputs, targets)
        reduction = "none" if of_events or weights is not None else mean
        try:
            values = function(outputs, targets, **on(outputs.device), reduction=reduction)
        except TypeError as error:
            raise N3LOError(f"{what}: {' '.join(str(error).split())}") from error
        if weights is None:
            return values.mean() if of_events else values
        if mean == "batchmean":
            values = values * outputs[0].numel()
        return (weights * mean_of_each(values)).mean()

    return loss


def _targets(name: str, outputs: Tensor, targets: Tensor) -> Tensor:
    """As a function of torch takes them."""
    if name not in OF_CLASSES:
        return alike(outputs, targets)
    if outputs.ndim < 2:
        raise N3LOError(
            f"{name} needs an output for each class, (B, C), and the model gives {shape(outputs)}; "
            "for two classes take 'bce', or give two outputs"
        )
    if name == "cross_entropy" and targets.shape == outputs.shape:
        return targets.to(outputs.dtype)  # probabilities, such as one-hot
    return class_numbers(outputs, targets)


def _arguments(what: str, settings: dict[str, Plain]) -> Callable[[torch.device], dict[str, Any]]:
    """What a function is called with on a device: lists of numbers become tensors."""
    try:
        values = {
            key: torch.tensor(value, dtype=torch.float32) if isinstance(value, list) else value
            for key, value in settings.items()
        }
    except (TypeError, ValueError) as error:
        raise N3LOError(f"{what}: {error}") from error
    return cache(
        lambda device: {
            key: value.to(device) if isinstance(value, Tensor) else value
            for key, value in values.items()
        }
    )


def _own(source: str, settings: dict[str, Plain]) -> Loss:
    """A function (outputs, targets) of the user's, or a class of such.

    One that takes `weights` is given those of the events, and weighs by itself; of another the
    values of the events are multiplied by them.
    """
    what = shown_source("training.loss", source)
    function = own_function(source, settings, "training.loss", may_take=(WEIGHTS,))
    is_set = WEIGHTS in getattr(function, "keywords", {})  # by the study, to something of its own
    parameter = None if is_set else _parameters(function).get(WEIGHTS)
    weighs = parameter is not None

    def loss(outputs: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        more = {WEIGHTS: weights} if weighs and weights is not None else {}
        if weighs and not more and parameter.default is parameter.empty:
            raise N3LOError(
                f"{what}: asks for weights, and the study has none: name them as data.weights, or "
                "give the argument the default None"
            )
        values = call_own(function, outputs, targets, what, source_file(source), **more)
        if not isinstance(values, Tensor):
            raise N3LOError(f"{what}: gives a {type(values).__name__}, not a tensor (no .item())")
        if values.numel() != 1 and (values.ndim == 0 or len(values) != len(outputs)):
            raise N3LOError(
                f"{what}: gives {tuple(values.shape)}; it must be the mean over the events, or "
                "have a value for each, (B,)"
            )
        if weights is None or weighs:
            return values.mean()
        if values.ndim == 0 or len(values) != len(outputs):
            raise N3LOError(
                f"{what}: gives {tuple(values.shape)}, of which data.weights cannot weigh the "
                "events; return a value for each, (B,), or take an argument called weights, (B,), "
                "and return the mean of weight times loss"
            )
        return (weights * mean_of_each(values)).mean()

    return loss


def own_function(
    source: str, settings: dict[str, Plain], key: str, may_take: Sequence[str] = ()
) -> Callable[..., Any]:
    """What a user's "file.py:name" is called as, with its arguments set.

    Args:
        may_take: what it is given by name beside outputs and targets, where it has it.

    Raises:
        N3LOError: it is not there, takes other arguments, or cannot be made.
    """
    what = shown_source(key, source)
    made = load_object(key, source)
    if not callable(made):
        raise N3LOError(f"{what}: is a {type(made).__name__}, not a function (outputs, targets)")
    if inspect.isclass(made):
        check_arguments(signature_of(made, what), settings, what)
        try:
            made, settings = made(**settings), {}
        except Exception as error:  # a user's class can raise anything
            raise N3LOError(f"{what}: {describe(error, source_file(source))}") from error
        if isinstance(made, nn.Module) and any(each.requires_grad for each in made.parameters()):
            raise N3LOError(f"{what}: has weights of its own, which no optimizer trains")
        _check_no_weight(_parameters(made), may_take, what)
        return made
    signature = signature_of(made, what)
    names = [*signature.parameters][:2]
    names += [name for name in may_take if name in signature.parameters and name not in settings]
    _check_no_weight(signature.parameters, (*may_take, *settings), what)
    check_arguments(signature, dict.fromkeys(names) | settings, what, tuple(names))
    return partial(made, **settings)


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """What it takes; nothing, where it does not tell."""
    called = function.forward if isinstance(function, nn.Module) else function
    try:
        return inspect.signature(called).parameters
    except (TypeError, ValueError):
        return {}


def _check_no_weight(
    parameters: Mapping[str, inspect.Parameter], given: Sequence[str], what: str
) -> None:
    """
    Raises:
        N3LOError: it asks for weights of events in another way than they are given.
    """
    for name, parameter in [*parameters.items()][2:]:
        if is_weight(name) and name not in given and parameter.default is parameter.empty:
            weighs = WEIGHTS in given
            way_out = f"call the argument {WEIGHTS}" if weighs else "they weigh what it returns"
            raise N3LOError(
                f"{what}: asks for '{name}': the weights of events are named by data.weights, and "
                f"{way_out}"
            )


def is_weight(name: str) -> bool:
    """Whether what is called so is the weight of an event: w, weights, genWeight, ..."""
    name = name.lower()
    ends = name.endswith(("weight", "weights")) and not name.startswith(("class", "loss"))
    return ends or name in ("w", "wt", "wgt")


def call_own(
    function: Callable[..., Any],
    outputs: Tensor,
    targets: Tensor,
    what: str,
    file: str | None,
    **more: Tensor,
) -> Any:
    """
    Raises:
        N3LOError: it fails; the text says where.
    """
    if isinstance(function, nn.Module):
        function.to(outputs.device)
    try:
        return function(outputs, targets, **more)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a user's function can raise anything
        raise N3LOError(
            f"{what}: {describe(error, file)}; outputs are {shape(outputs)} "
            f"{_type(outputs)}, targets are {shape(targets)} {_type(targets)}"
        ) from error


def _type(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


# -- several ---------------------------------------------------------------------------------------


def _of_each(spec: Plain, make: Callable[[Any], T]) -> T | list[T] | dict[str, T]:
    if isinstance(spec, list):
        return [make(each) for each in spec]
    if isinstance(spec, dict) and "name" not in spec:
        return {name: make(each) for name, each in spec.items()}
    return make(spec)


def settings_of(spec: str | Mapping[str, Plain]) -> dict[str, Plain]:
    """A loss as a table; its name is torch's, or "" of a user's own."""
    settings = {"name": spec} if isinstance(spec, str) else dict(spec)
    name = settings["name"]
    return {**settings, "name": "" if ":" in name else LOSS_ALIASES.get(name, name)}


def _values(several: Any) -> list[Any]:
    return list(several.values()) if isinstance(several, dict) else list(several)


def _by_key(values: Any) -> dict[Any, Any]:
    if isinstance(values, dict):
        return values
    return dict(enumerate(values)) if isinstance(values, list | tuple) else {None: values}


def _at(values: Any, key: Hashable, where: str) -> Any:
    """What one of several targets has; a single value is that of all."""
    if not isinstance(values, list | dict):
        return values
    there = _by_key(values)
    if key not in there:
        raise N3LOError(f"{where}: is for {_said(list(there))}, but there is {_said([key])}")
    return there[key]


def _said(keys: list[Any]) -> str:
    if keys == [None]:
        return "one target"
    if all(isinstance(key, int) for key in keys):
        return f"a list of {len(keys)} targets"
    return f"the targets {', '.join(map(str, keys))}"
