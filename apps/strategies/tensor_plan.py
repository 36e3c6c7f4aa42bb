"""A model split over ranks within its layers: each holds some columns or rows of a weight.

All ranks of a mesh compute the same batch. What a split layer gives to the rest of the model is
whole, and the same on all of them; only between a "column" layer and its "row" layer does each rank
have its own columns. These are a DTensor, which knows of its other parts: whatever a model does
with it is right, or an error, but never the arithmetic of one part taken for the whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.nn.utils import get_total_norm
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from apps.contract import N3LOError
from apps.experiment import call

COLUMN = "column"  # a part of the outputs, which stay apart for the "row" layer that reads them
ROW = "row"  # a part of the inputs; the outputs are summed over ranks
GATHERED = "column_gathered"  # a part of the outputs, which are then gathered
DROPOUT = "dropout"  # between "column" and "row"
STYLES = (COLUMN, ROW, GATHERED)

# What works on columns as on the whole, and DTensor can differentiate (torch 2.13).
ELEMENTWISE = {
    *("relu", "relu_", "leaky_relu", "leaky_relu_", "elu", "elu_", "selu", "selu_", "celu"),
    *("gelu", "silu", "mish", "softplus", "softsign", "tanh", "tanh_", "tanhshrink"),
    *("sigmoid", "sigmoid_", "dropout"),
}
# What a DTensor answers for the whole.
METADATA = {
    *("shape", "size", "ndim", "dim", "numel", "__len__", "dtype", "device", "layout"),
    *("is_cuda", "is_floating_point", "requires_grad"),
}


TENSOR = "training.strategy: 'tensor'"


def plan_of(
    model: nn.Module,
    inputs: Any,
    num_ranks: int,
    given: Mapping[str, str] | None = None,
    asked_by: str = TENSOR,
) -> dict[str, str]:
    """How each layer that can be split is split, by its name.

    Two Linear layers with nothing but activations and dropout between them are a pair, "column"
    and "row", which costs one sum over ranks; any other Linear or Embedding is "column_gathered".
    Dropouts within a pair are listed, too.

    Args:
        inputs: a few events; the model sees them once.
        given: the user's own plan, by patterns of names; no other layer is split then.
        asked_by: where the study asks for it, for the error.

    Raises:
        N3LOError: the given plan does not fit the model, or nothing can be split.
    """
    plan = found_plan(model, inputs, num_ranks, given)
    if not plan:
        raise nothing_to_split(num_ranks, asked_by)
    return plan


def found_plan(
    model: nn.Module, inputs: Any, num_ranks: int, given: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The same, or nothing, if there is nothing to split."""
    layers = _Layers(model, _recorded(model, inputs), num_ranks)
    return layers.checked(given) if given else layers.paired()


def nothing_to_split(num_ranks: int, asked_by: str) -> N3LOError:
    way_out = "use 'pipeline' or 'sharded'" if asked_by == TENSOR else "set it to 1"
    return N3LOError(
        f"{asked_by} splits Linear and Embedding layers, and this model has none that "
        f"{num_ranks} ranks can share; {way_out}"
    )


def split(model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, str]) -> None:
    """Leave each rank with its part of the model, in place.

    The parameters of split layers become DTensors. All ranks must hold the same weights.

    Args:
        mesh: of one dimension.
        plan: from `plan_of`, the same on all ranks.
    """
    # PyTorch's fused attention reads weights past the layers that hold them.
    torch.backends.mha.set_fastpath_enabled(False)
    for name, style in plan.items():
        layer = model.get_submodule(name)
        if style == DROPOUT:
            layer.__class__ = SplitDropout
            continue
        parallelize_module(layer, mesh, _parallel(style), src_data_rank=None)
        if style != COLUMN:
            layer.register_forward_hook(_with_own_memory)


class SplitDropout(nn.Dropout):
    """Draws for all columns and uses its own.

    Ranks with one seed thus stay in step, and drop what the unsplit model would.
    """

    def forward(self, columns: DTensor) -> DTensor:
        if not self.training:
            return columns
        ones = torch.ones(columns.shape, dtype=columns.dtype, device=columns.device)
        kept = functional.dropout(ones, self.p)
        return columns * cut_like(kept, columns)


# -- what a rank holds -----------------------------------------------------------------------------


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor, in the same memory."""
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """All of a tensor; collective where it is split.

    Args:
        like: a parameter; `tensor` may then be what an optimizer keeps for this rank's part of it.
    """
    if isinstance(like, DTensor) and tensor.shape == local(like).shape:
        tensor = DTensor.from_local(
            tensor, like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
        )
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def cut_like(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A whole tensor, split as `like` is; what has another shape stays whole. Not collective."""
    if not isinstance(like, DTensor) or tensor.shape != like.shape:
        return tensor
    return distribute_tensor(tensor.detach(), like.device_mesh, like.placements, src_data_rank=None)


def parts_of(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """What this rank holds of each parameter, in the same memory, for an optimizer.

    Optimizers fail on lists of both DTensors and plain tensors. Any that works element by element
    does on its parts what it would do on the whole.
    """
    return [
        nn.Parameter(local(each), each.requires_grad) if isinstance(each, DTensor) else each
        for each in parameters
    ]


def give_gradients(parameters: Sequence[nn.Parameter], parts: Sequence[nn.Parameter]) -> None:
    """Let the parts have the gradients of the parameters, which then have none.

    The optimizer's zero_grad() thus clears them all.
    """
    for parameter, part in zip(parameters, parts, strict=True):
        if isinstance(parameter, DTensor) and parameter.grad is not None:
            part.grad = local(parameter.grad.redistribute(placements=parameter.placements))
            parameter.grad = None


def total_norm(parameters: Sequence[nn.Parameter], parts: Sequence[nn.Parameter]) -> torch.Tensor:
    """The L2 norm of all gradients of the parts, as the unsplit model has it; collective."""
    alone: list[torch.Tensor] = []  # of this rank
    common: list[torch.Tensor] = []
    for parameter, part in zip(parameters, parts, strict=True):
        if part.grad is not None:
            (alone if is_split(parameter) else common).append(part.grad)
    square = get_total_norm(common) ** 2
    if alone:
        of_parts = get_total_norm(alone) ** 2
        [mesh] = {each.device_mesh for each in parameters if is_split(each)}
        dist.all_reduce(of_parts, group=mesh.get_group())
        square = square + of_parts
    return square.sqrt()


def is_split(tensor: torch.Tensor) -> bool:
    """Whether ranks hold different parts of a tensor."""
    return isinstance(tensor, DTensor) and any(each.is_shard() for each in tensor.placements)


# -- splitting -------------------------------------------------------------------------------------


def _parallel(style: str) -> ParallelStyle:
    if style == ROW:  # of inputs that are whole, each rank takes its columns
        return RowwiseParallel(input_layouts=Replicate())
    if style == GATHERED:
        return ColwiseParallel(output_layouts=Replicate())
    return ColwiseParallel(use_local_output=False)


def _with_own_memory(_layer: nn.Module, _inputs: Any, outputs: torch.Tensor) -> torch.Tensor:
    """DTensor gives a view, into which a model may not write, as in `outputs += inputs`."""
    return outputs.clone()


# -- what the model does ---------------------------------------------------------------------------


class _Event(NamedTuple):
    """A function that the model calls."""

    function: str
    reads: list[torch.Tensor]
    gives: list[torch.Tensor]
    layer: str | None  # the Linear, Embedding or Dropout that calls it


class _Recorder(TorchFunctionMode):
    """Sees all functions of tensors, those of modules as well as those that a model calls itself.

    The events hold on to their tensors, so that no other takes the place of one in memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.events: list[_Event] = []
        self.layer: str | None = None

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = _name(function)
        if name not in METADATA:
            reads = _tensors((args, kwargs))
            self.events.append(_Event(name, reads, _tensors(result), self.layer))
        return result

    def watch(self, name: str, layer: nn.Module) -> list[Any]:
        """Know which functions are the layer's own, if it is called as layer(x)."""

        def enter(_layer: nn.Module, inputs: tuple[Any, ...]) -> None:
            self.layer = name if inputs else None

        def leave(*_: Any) -> None:
            self.layer = None

        return [layer.register_forward_pre_hook(enter), layer.register_forward_hook(leave)]


def _recorded(model: nn.Module, inputs: Any) -> list[_Event]:
    """What the model does with the inputs, to the end, which reads its outputs."""
    recorder = _Recorder()
    training = {module: module.training for module in model.modules()}
    handles = [
        handle
        for name, module in model.named_modules()
        if type(module) in (nn.Linear, nn.Embedding, nn.Dropout)
        for handle in recorder.watch(name, module)
    ]
    try:
        model.eval()
        with torch.no_grad(), recorder:
            outputs = call(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in training.items():
            module.training = mode
    return [*recorder.events, _Event("return", _tensors(outputs), [], None)]


def _name(function: Any) -> str:
    """Of a function, or of the property that it gets."""
    name = getattr(function, "__name__", "")
    return function.__self__.__name__ if name == "__get__" else name


def _tensors(values: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]


# -- which layers can be split, and how ------------------------------------------------------------


class _Layers:
    """The Linear and Embedding layers of a model, with what it does with them."""

    def __init__(self, model: nn.Module, events: list[_Event], num_ranks: int) -> None:
        self._layers = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear | nn.Embedding)
        }
        self._events = events
        self._num_ranks = num_ranks
        self._names = Counter(
            id(each) for _, each in model.named_parameters(remove_duplicate=False)
        )

    def paired(self) -> dict[str, str]:
        """The plan without the user's help."""
        plan: dict[str, str] = {}
        for name in [event.layer for event in self._events if event.layer in self._layers]:
            if name in plan or self._obstacle(name, COLUMN):
                continue
            reader, dropouts = self._reader(name)
            if reader is None or self._obstacle(reader, ROW):
                plan[name] = GATHERED
            else:
                plan |= {name: COLUMN, **dict.fromkeys(dropouts, DROPOUT), reader: ROW}
        return plan

    def checked(self, given: Mapping[str, str]) -> dict[str, str]:
        """The user's plan by names; of patterns that match a layer, the last counts."""
        plan: dict[str, str] = {}
        for pattern, style in given.items():
            if style not in STYLES:
                raise _wrong(pattern, style, f"there is {', '.join(STYLES)}")
            names = [name for name in self._layers if fnmatchcase(name, pattern)]
            if not names:
                there = ", ".join(self._layers) or "none"
                raise _wrong(pattern, style, f"of Linear and Embedding layers there is {there}")
            plan |= dict.fromkeys(names, style)
        for name, style in list(plan.items()):
            if obstacle := self._obstacle(name, style):
                raise _wrong(name, style, f"{obstacle}; leave it out")
            if style == COLUMN:
                plan |= self._dropouts_to_row(name, plan)
        return plan

    def _dropouts_to_row(self, name: str, plan: dict[str, str]) -> dict[str, str]:
        reader, dropouts = self._reader(name)
        if reader is None or plan.get(reader) != ROW:
            raise _wrong(
                name,
                COLUMN,
                "its outputs must go through nothing but activations and dropout to one Linear "
                f"that is '{ROW}'; use '{GATHERED}'",
            )
        return dict.fromkeys(dropouts, DROPOUT)

    def _reader(self, name: str) -> tuple[str | None, list[str]]:
        """The Linear that alone reads what a layer gives, and the dropouts before it."""
        [at] = [at for at, event in enumerate(self._events) if event.layer == name]
        dropouts: list[str] = []
        while True:
            [tensor] = self._events[at].gives
            readers = [
                later
                for later in range(at + 1, len(self._events))
                if any(each is tensor for each in self._events[later].reads)
            ]
            if not readers:
                return None, []
            at = readers[0]
            event = self._events[at]
            in_place = any(each is tensor for each in event.gives)
            if len(readers) > 1 and not in_place:
                return None, []
            if isinstance(self._layers.get(event.layer), nn.Linear):
                return event.layer, dropouts
            if event.function not in ELEMENTWISE or len(event.reads) > 1:
                return None, []
            if event.function == "dropout":
                if event.layer is None or self._calls(event.layer) != 1:
                    return None, []
                dropouts.append(event.layer)

    def _calls(self, name: str) -> int:
        """How many functions a layer calls when it is called as layer(x)."""
        return sum(event.layer == name for event in self._events)

    def _obstacle(self, name: str, style: str) -> str | None:
        """Why a layer cannot be split so."""
        layer = self._layers[name]
        if isinstance(layer, nn.Embedding):
            if style == ROW:
                return f"an Embedding has no inputs to split; use '{GATHERED}'"
            if layer.max_norm is not None or layer.sparse:
                return "an Embedding with max_norm or sparse needs its whole weight"
            num_features = layer.embedding_dim
        else:
            num_features = layer.in_features if style == ROW else layer.out_features
        parameters = [layer.weight]
        if getattr(layer, "bias", None) is not None:
            parameters.append(layer.bias)
        read = {id(each) for each in parameters}
        uses = [event for event in self._events if read & {id(each) for each in event.reads}]
        if self._calls(name) != 1 or len(uses) != 1 or uses[0].layer != name:
            return "its weight is used in another way than by one call of the layer"
        if any(self._names[id(each)] != 1 for each in parameters):
            return "it shares its weight with another layer"
        # The parts are equal but for the last: 2, 2 and 1 of 5.
        if -(-num_features // self._num_ranks) * (self._num_ranks - 1) >= num_features:
            return f"{num_features} cannot be shared by {self._num_ranks} ranks"
        return None


def _wrong(name: str, style: str, what: str) -> N3LOError:
    return N3LOError(f"training.split.tensor: '{name}' = '{style}': {what}")
