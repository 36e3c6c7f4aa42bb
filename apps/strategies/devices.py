"""One process with several GPUs, which hold consecutive layers of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from apps.strategies import stages


def spread(network: nn.Module, devices: Sequence[torch.device], inputs: Any) -> None:
    """Divide the layers of a network over devices, balanced by what they cost, in place.

    It then is called as before, on whatever device its inputs are, and gives its outputs on the
    first. One device works at a time: this is for models that do not fit into one of them.

    Args:
        network: on the CPU.
        inputs: of a few events, on the CPU.

    Raises:
        N3LOError: it cannot be divided, or into so many parts.
    """
    traced = stages.trace(network, inputs, stages.GPUS)
    cuts = stages.cut(traced, stages.costs(traced, inputs), len(devices), "layout.gpus_per_rank")
    parts = stages.stages(traced, cuts)
    for part, device in zip(parts, devices, strict=True):
        part.to(device)
        for name, buffer in part.named_buffers():  # unlike parameters, they are new ones now
            path, _, field = name.rpartition(".")
            network.get_submodule(path)._buffers[field] = buffer

    def forward(*arguments: Any, **named: Any) -> Any:
        given = named or (arguments if traced.inputs is not None else arguments[0])
        values = stages.positional(traced, given)
        for part, device in zip(parts, devices, strict=True):
            outputs = part(*(each.to(device) for each in values))
            values = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
        given_back = [each.to(devices[0]) for each in values]
        return stages.restore(traced, given_back if traced.outputs is not None else given_back[0])

    network.forward = forward
