"""Common mistakes in a user's model, in one line each that says how to mend it.

Torch says what it could not compute; here it is said which layer got what, and which key of the
study or line of the model to change. Whether its outputs suit the loss: `apps.suited`.
"""

from __future__ import annotations

import copy
import inspect
import math
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.utils._pytree import tree_leaves, tree_map

from apps.contract import N3LOError
from apps.hdf5 import Fields
from apps.losses import shape
from apps.sources import LEAVE_THE_DEVICE, place_of

MOST_NAMES = 3  # of weights, in a warning
COMPILED = "_orig_mod."  # in names of weights, by torch.compile


@contextmanager
def limited(seconds: float, message: str) -> Iterator[None]:
    """Raise what `message` says, where this takes longer; in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise TimeoutError(message)

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# -- the model is called ---------------------------------------------------------------------------


class Call(NamedTuple):
    """What a layer was called with."""

    name: str  # of the layer
    layer: nn.Module
    inputs: list[Tensor]

    @property
    def shown(self) -> str:
        kind = type(self.layer).__name__
        return f"layer '{self.name}' ({kind})" if self.name else f"the model, a {kind},"


class Watch:
    """Knows what a network was called with, and the layer that was at work when an error came."""

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        self.failed: Call | None = None
        self.called: tuple[tuple[Any, ...], dict[str, Any]] = (), {}

    @contextmanager
    def watching(self) -> Iterator[Watch]:
        hooks = [self.network.register_forward_pre_hook(self._begin_all, with_kwargs=True)]
        for name, layer in self.network.named_modules():
            if not any(True for _ in layer.children()):
                hooks.append(layer.register_forward_pre_hook(self._begin(name), with_kwargs=True))
                hooks.append(layer.register_forward_hook(self._end))
        try:
            yield self
        finally:
            for hook in hooks:
                hook.remove()

    def _begin(self, name: str) -> Callable[..., None]:
        def begin(layer: nn.Module, arguments: Any, keywords: Any) -> None:
            values = [each for each in tree_leaves((arguments, keywords)) if torch.is_tensor(each)]
            self.failed = Call(name, layer, values)

        return begin

    def _end(self, *_: Any) -> None:
        self.failed = None

    def _begin_all(self, _: nn.Module, arguments: Any, keywords: Any) -> None:
        self.called = arguments, keywords


def explain(watch: Watch, names: Sequence[str], inputs: Any) -> str | None:
    """Why the model could not be called, and the way out; None if that is not known.

    Args:
        names: of the inputs, in the study.
        inputs: of the batch.
    """
    given = {id(each): name for each, name in zip(_leaves(inputs), names, strict=False)}
    call = watch.failed
    if call is None:
        return _of_signature(watch) or _of_whole_numbers(watch, given)
    if not call.inputs:
        return None
    first = call.inputs[0]
    name = given.get(id(first))
    for kinds, of_layer in LAYERS:
        if isinstance(call.layer, kinds):
            what = of_layer(call.layer, first, name)
            return None if what is None else f"{call.shown} takes {what}"
    return None


def names_of(fields: Fields) -> list[str]:
    """What the study calls its fields."""
    return [each.name if fields.kind == "table" else each.text for each in fields.members]


def _leaves(inputs: Any) -> list[Any]:
    if isinstance(inputs, dict):
        return list(inputs.values())
    return list(inputs) if isinstance(inputs, list) else [inputs]


def _of_signature(watch: Watch) -> str | None:
    signature, (arguments, keywords) = inspect.signature(watch.network.forward), watch.called
    try:
        signature.bind(*arguments, **keywords)
    except TypeError:
        takes = ", ".join(signature.parameters) or "nothing"
        if keywords:
            return (
                f"forward takes ({takes}), and data.inputs is a table of {', '.join(keywords)}; "
                "give it the names that forward has"
            )
        return (
            f"forward takes ({takes}), and data.inputs names {len(arguments)}; name as many fields "
            "as it takes"
        )
    return None


def _of_whole_numbers(watch: Watch, given: Mapping[int, str]) -> str | None:
    """Where the data hold whole numbers, and the model has no layer that wants such."""
    layers = watch.network.modules()
    embeds = any(isinstance(each, nn.Embedding | nn.EmbeddingBag) for each in layers)
    for value in tree_leaves(watch.called):
        if torch.is_tensor(value) and not value.is_floating_point() and not embeds:
            return f"the model fails on whole numbers; {_numbers_of(given.get(id(value)))}"
    return None


def _numbers_of(name: str | None) -> str:
    """The way from indices to numbers that a layer can multiply."""
    if name is None:
        return "convert them by .float() before the layer"
    return (
        f"input '{name}' holds whole numbers, which are given as indices (int64); to give "
        f'them as float32, set data.transforms."{name}" = ["scale"] (as they are) or '
        '["normalise"]'
    )


def _gets(values: Tensor, name: str | None) -> str:
    return f"and input '{name}' gives {shape(values)}" if name else f"and gets {shape(values)}"


def _of_linear(layer: Any, values: Tensor, name: str | None) -> str | None:
    asked, there = layer.in_features, values.shape[-1]
    if not values.is_floating_point():
        return f"float32 numbers; {_numbers_of(name)}"
    if values.ndim == 1:  # there is the number of events
        if asked > 1:
            return f"{asked} features, {_gets(values, name)}, one number an event"
        by_study = f'data.transforms."{name}" = ["channel_axis"], or ' if name else ""
        return f"(B, 1), {_gets(values, name)}: set {by_study}x.unsqueeze(1)"
    if asked == there:
        return None
    together = math.prod(values.shape[1:])
    if together == asked:
        by_study = f' or data.transforms."{name}" = ["flatten"]' if name else ""
        return (
            f"{asked} features, {_gets(values, name)}: flatten that, by torch.nn.Flatten() before "
            f"it{by_study}"
        )
    flat = f" (or to {together}, after torch.nn.Flatten())" if values.ndim > 2 else ""
    return (
        f"{asked} features, {_gets(values, name)}: set its in_features to {there}{flat}, by "
        "model.args or in the model's file"
    )


def _of_convolution(layer: Any, values: Tensor, name: str | None) -> str | None:
    axes, asked = len(layer.kernel_size), layer.in_channels
    if not values.is_floating_point():
        return f"float32 numbers; {_numbers_of(name)}"
    wanted = f"(B, {asked}, ...) with {axes} more ax{'i' if axes == 1 else 'e'}s"
    if values.ndim == axes + 1:
        by_study = f'data.transforms."{name}" = ["channel_axis"], or ' if name else ""
        return (
            f"{wanted}, {_gets(values, name)}, which has no axis of channels: add one, by "
            f"{by_study}x.unsqueeze(1)"
        )
    if values.ndim != axes + 2:
        return f"{wanted}, {_gets(values, name)}: reshape that"
    if values.shape[1] == asked:
        return None
    if values.shape[-1] == asked:
        order = [axes + 1, *range(1, axes + 1)]
        by_study = (
            f'data.transforms."{name}" = [{{ name = "transpose", axes = {order} }}]'
            if name
            else f"x.permute(0, {', '.join(map(str, order))})"
        )
        return f"{wanted}, {_gets(values, name)}, where the channels come last: set {by_study}"
    return (
        f"{asked} channels, {_gets(values, name)}: set its in_channels to {values.shape[1]}, by "
        "model.args or in the model's file"
    )


def _of_batch_norm(layer: Any, values: Tensor, name: str | None) -> str | None:
    if not values.is_floating_point():
        return f"float32 numbers; {_numbers_of(name)}"
    if values.ndim < 2 or values.shape[1] == layer.num_features:
        return None
    return (
        f"{layer.num_features} features on axis 1, {_gets(values, name)}: set its num_features to "
        f"{values.shape[1]}"
    )


def _of_recurrent(layer: Any, values: Tensor, name: str | None) -> str | None:
    if not values.is_floating_point():
        return f"float32 numbers; {_numbers_of(name)}"
    if values.shape[-1] == layer.input_size:
        return None
    if values.ndim == 2 and layer.input_size == 1:
        by_study = (
            f'data.transforms."{name}" = [{{ name = "channel_axis", at = "last" }}], or '
            if name
            else ""
        )
        return (
            f"(B, steps, 1), {_gets(values, name)}: add an axis of features, by {by_study}"
            "x.unsqueeze(-1)"
        )
    return (
        f"{layer.input_size} features a step, {_gets(values, name)}: set its input_size to "
        f"{values.shape[-1]}"
    )


def _of_embedding(layer: Any, values: Tensor, name: str | None) -> str | None:
    number = layer.num_embeddings
    if values.is_floating_point():
        return (
            f"indices, which are whole numbers, {_gets(values, name)} float32: store them as "
            "integers, or convert them by .long()"
        )
    low, high = int(values.min()), int(values.max())
    if low >= 0 and high < number:
        return None
    source = f"input '{name}'" if name else "what it gets"
    return (
        f"indices from 0 to {number - 1}, and {source} holds {low} to {high}: set its "
        f"num_embeddings to at least {high + 1}"
        + (", and begin the indices at 0" if low < 0 else "")
    )


LAYERS: tuple[tuple[Any, Callable[[Any, Tensor, str | None], str | None]], ...] = (
    (nn.Linear, _of_linear),
    ((_ConvNd, _ConvTransposeNd), _of_convolution),
    (_BatchNorm, _of_batch_norm),
    (nn.RNNBase, _of_recurrent),
    ((nn.Embedding, nn.EmbeddingBag), _of_embedding),
)


def check_device(watch: Watch, file: str | None) -> None:
    """See that forward makes its tensors where its inputs are, on a device without numbers.

    Matrix products do not tell; what they leave is found on the GPU (`apps.sources.HINTS`).

    Args:
        watch: of a call that went well.
        file: of the model.

    Raises:
        N3LOError: it makes them on the CPU, which would fail on a GPU.
    """
    arguments, keywords = tree_map(
        lambda each: each.to("meta") if torch.is_tensor(each) else each, watch.called
    )
    try:
        with torch.no_grad():
            copy.deepcopy(watch.network).to("meta")(*arguments, **keywords)
    except Exception as error:  # not all that a model may do can be done without numbers
        if "device meta" in str(error):
            raise N3LOError(
                "forward has a tensor on the CPU, where the model and its inputs will be on a GPU "
                f"({place_of(error, file)}); {LEAVE_THE_DEVICE}"
            ) from error


# -- weights ---------------------------------------------------------------------------------------


def check_weights(network: nn.Module, name: str) -> None:
    """
    Raises:
        N3LOError: there is nothing to train.
    """
    if any(isinstance(each, torch.jit.ScriptModule) for each in network.modules()):
        raise N3LOError(
            f"model '{name}' is of torch.jit.script, whose layers cannot be looked at: give the "
            "module itself; training.compile = true compiles it"
        )
    parameters = list(network.parameters())
    if not parameters:
        raise N3LOError(
            f"model '{name}' has no weights to train: make its layers in __init__, as attributes "
            "(self.layer = ...) or in a torch.nn.ModuleList, not in a plain list"
        )
    if not any(each.requires_grad for each in parameters):
        raise N3LOError(
            f"model '{name}': all its weights are frozen (requires_grad = False); leave some to "
            "train"
        )


def of_names(network: nn.Module) -> Iterator[str]:
    """A warning about names that the weights of a compiled model have."""
    if any(COMPILED in name for name, _ in network.named_parameters()):
        yield (
            "the model is compiled by torch.compile, so the names of its weights have "
            f"'{COMPILED}' in them; give the module itself, and set training.compile = true"
        )


def of_gradient(network: nn.Module, loss: Tensor) -> Iterator[str]:
    """Warnings about weights that a loss does not depend on.

    Raises:
        N3LOError: it depends on none.
    """
    named = {name: each for name, each in network.named_parameters() if each.requires_grad}
    if not loss.requires_grad:
        raise N3LOError(
            "the loss does not depend on the weights; look for .detach(), .data, .item(), numpy, "
            "argmax or torch.no_grad() in forward (or in your own loss)"
        )
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    unused = [name for name, each in zip(named, found, strict=True) if each is None]
    if unused:
        more = f" and {len(unused) - MOST_NAMES} more" if len(unused) > MOST_NAMES else ""
        yield (
            f"the loss does not depend on {', '.join(unused[:MOST_NAMES])}{more}: forward does not "
            "use them, or detaches what they give"
        )
