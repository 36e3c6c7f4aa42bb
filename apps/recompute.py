"""Activation checkpointing: layers that are computed a second time in the backward pass.

Their inner activations need no memory in between, for one more forward pass of them.
Chen et al. 2016, https://arxiv.org/abs/1604.06174.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from apps.contract import N3LOError

NAMES_SHOWN = 20


def recompute(network: nn.Module, patterns: Sequence[str]) -> None:
    """Have the outermost layers whose qualified names match run under checkpointing.

    Names, parameters and buffers stay. Random numbers and buffers are in the second pass what they
    were in the first, so that dropout drops the same and BatchNorm counts a batch once; other
    state, as of Python's or NumPy's random numbers, is not. Without gradients, and in eval mode,
    the layers run as they are.

    Args:
        patterns: as of a shell, where * also matches dots: "*" is the direct children,
            "blocks.*" those of `blocks`. A layer that is never called, as a ModuleList, stands for
            the layers in it.

    Raises:
        N3LOError: a pattern matches no layer.
    """
    names = [name for name, _ in network.named_modules() if name]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise N3LOError(f"training.recompute: '{pattern}' matches no layer, {_listed(names)}")
    for layer in _outermost(network, patterns):
        # torch.compile cannot trace the context below, and so leaves these layers as they are.
        # A method, as copy.deepcopy binds it to the copy.
        layer.forward = types.MethodType(torch.compiler.disable(forward), layer)


def forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What the layer's class computes; named as it is for pickle, which looks it up by name."""
    compute = types.MethodType(type(layer).forward, layer)
    if not (layer.training and torch.is_grad_enabled()):
        return compute(*args, **kwargs)
    return checkpoint(
        compute,
        *args,
        use_reentrant=False,
        preserve_rng_state=True,
        context_fn=lambda: (nullcontext(), _Buffers(layer)),
        **kwargs,
    )


class _Buffers(AbstractContextManager[None]):
    """Within it, the buffers of a layer are what they were when this was made.

    They are exchanged for copies: writing to them would invalidate what autograd has saved.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._before = [
            (module, name, buffer.clone())
            for module in layer.modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]
        self._after: list[torch.Tensor] = []

    def __enter__(self) -> None:
        self._after = [module.get_buffer(name) for module, name, _ in self._before]
        for module, name, buffer in self._before:
            module._buffers[name] = buffer.clone()  # a graph that is kept is run once more

    def __exit__(self, *_: object) -> None:
        for (module, name, _), buffer in zip(self._before, self._after, strict=True):
            module._buffers[name] = buffer


def _outermost(
    network: nn.Module, patterns: Sequence[str], prefix: str = ""
) -> Iterator[nn.Module]:
    for name, child in network.named_children():
        matches = any(fnmatchcase(prefix + name, pattern) for pattern in patterns)
        is_called = type(child).forward is not nn.Module.forward
        if matches and is_called:
            yield child
        else:
            yield from _outermost(child, ["*"] if matches else patterns, f"{prefix}{name}.")


def _listed(names: list[str]) -> str:
    if not names:
        return "as the model is one layer"
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return "only " + ", ".join(names[:NAMES_SHOWN]) + more
