"""A model as a line of pipeline stages: each rank of a worker holds one and passes tensors on.

torch.fx records what the model calls. The layers of torch.nn stay modules in the record, so that
train() and eval() still reach dropout and BatchNorm; torch's own `pipeline()` exports the model,
which fixes them in training mode.
"""

from __future__ import annotations

import operator
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, chain, pairwise
from math import inf
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate

from apps.contract import N3LOError
from apps.experiment import call, describe, untouched

PIPELINE = "training.strategy: 'pipeline' cannot cut this model: {}; use 'sharded' or 'allreduce'"
GPUS = (
    "layout.gpus_per_rank: a rank's GPUs cannot divide this model: {}; use 'sharded' with one GPU "
    "for each rank"
)
AT = "training.split.stages"  # where a study names the modules that begin a stage
REPEATS = 3  # measurements of an operation, of which the least counts, after one to warm up
TOLERANCE = 1e-3  # relative, between a model and its record: some GPU sums change from run to run

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by dimensions

Inputs = torch.Tensor | list[torch.Tensor] | dict[str, torch.Tensor]


class _Uncut(Exception):
    """A model cannot be recorded; the text says why."""


class Value(NamedTuple):
    """What a node gave when it was recorded."""

    kind: Any  # the dtype of a tensor, the type of a number, None for all else
    num_bytes: int
    memory: int  # its address
    is_channels_last: bool

    @classmethod
    def of(cls, value: Any) -> Value:
        if not isinstance(value, torch.Tensor):
            return cls(type(value) if isinstance(value, bool | int | float) else None, 0, 0, False)
        layout = CHANNELS_LAST.get(value.ndim, torch.contiguous_format)
        return cls(
            value.dtype,
            value.numel() * value.element_size(),
            value.untyped_storage().data_ptr(),
            value.is_contiguous(memory_format=layout) and not value.is_contiguous(),
        )


@dataclass(frozen=True)
class Traced:
    """A model as the operations that it does, in order. A cut is the index of a node."""

    model: nn.Module
    graph: fx.Graph
    inputs: Sequence[Any] | None  # the names or places of the inputs; None: one tensor
    outputs: Sequence[Any] | None  # likewise

    @cached_property
    def nodes(self) -> list[fx.Node]:
        return list(self.graph.nodes)

    def live(self, index: int) -> list[fx.Node]:
        """The nodes before a cut whose values are needed after it, parameters left out."""
        return [
            node
            for node, last in zip(self.nodes[:index], self._last_uses, strict=False)
            if last >= index and node.op != "get_attr"
        ]

    def obstacle(self, index: int) -> str | None:
        """Why there can be no cut, if there can be none."""
        live = self.live(index)
        for node in live:
            if node.meta["value"].kind is None:
                return f"'{node.name}', needed on both sides, is neither a tensor nor a number"
        if not any(isinstance(node.meta["value"].kind, torch.dtype) for node in live):
            return "no tensor passes there"
        for name, first, last in self._spans:
            if first < index <= last:
                return f"'{name}' is needed on both sides"
        # Two views of one memory would part, and a later write into one not reach the other.
        memories = Counter(node.meta["value"].memory for node in live)
        shared = {memory for memory, count in memories.items() if memory and count > 1}
        if any(shared & node.meta.get("writes", set()) for node in self.nodes[index:]):
            return "memory that is written to later would be needed on both sides"
        return None

    def tensors(self, node: fx.Node) -> Iterator[tuple[str, torch.Tensor]]:
        """The parameters and buffers that a node holds, by their names in the model."""
        if node.op == "get_attr":
            held = operator.attrgetter(node.target)(self.model)
            if isinstance(held, torch.Tensor):
                yield node.target, held
        elif node.op == "call_module":
            yield from _tensors(self.model.get_submodule(node.target), f"{node.target}.")

    @cached_property
    def num_trained(self) -> list[int]:
        """Trained parameters in the nodes before each index."""
        counts = [sum(each.requires_grad for _, each in self.tensors(n)) for n in self.nodes]
        return [0, *accumulate(counts)]

    @cached_property
    def _last_uses(self) -> list[int]:
        order = {node: index for index, node in enumerate(self.nodes)}
        return [max(map(order.__getitem__, node.users), default=-1) for node in self.nodes]

    @cached_property
    def _spans(self) -> list[tuple[str, int, int]]:
        """First and last use of each parameter and buffer, under any of its names."""
        spans: dict[int, tuple[str, int, int]] = {}
        for index, (node, last) in enumerate(zip(self.nodes, self._last_uses, strict=True)):
            last = last if node.op == "get_attr" else index
            for name, tensor in self.tensors(node):
                name, first, before = spans.get(id(tensor), (name, index, index))
                spans[id(tensor)] = name, first, max(before, last)
        return list(spans.values())


# -- the record ------------------------------------------------------------------------------------


def trace(model: nn.Module, inputs: Inputs, refusal: str = PIPELINE) -> Traced:
    """Record the operations of a model.

    A module that cannot be recorded (it decides by its data) stays whole. The record must give
    what the model gives, outputs and gradients, in training and in evaluation: this is tried.

    Args:
        inputs: of a few events, passed as `apps.experiment.call` does.
        refusal: what to say, with {} for the reason.

    Raises:
        N3LOError: it cannot be recorded.
    """
    try:
        return _trace(model, inputs)
    except _Uncut as error:
        raise N3LOError(refusal.format(error)) from error


def _trace(model: nn.Module, inputs: Inputs) -> Traced:
    with untouched(model), torch.enable_grad():
        form = _form(call(model, inputs))
        graph = _record(model, inputs)
        _move_attributes(graph)
        traced = Traced(model, graph, _keys(inputs), form)
        recorded = partial(_Recorder(model, graph=graph).run, *positional(traced, inputs))
        for mode in (False, True):
            expected = _outcome(model, partial(call, model, inputs), mode)
            if not all(map(_alike, expected, _outcome(model, recorded, mode))):
                raise _Uncut(
                    f"{type(model).__name__}.forward does what a record of it loses (self.training,"
                    " torch.no_grad, autocast or random numbers of its own)"
                )
    return traced


def positional(traced: Traced, inputs: Inputs) -> tuple[torch.Tensor, ...]:
    """The inputs in the order in which the first stage takes them."""
    return (inputs,) if traced.inputs is None else tuple(inputs[key] for key in traced.inputs)


def restore(traced: Traced, outputs: torch.Tensor | Sequence[torch.Tensor]) -> Any:
    """What the model gives, from what the last stage gives: one tensor, a list or a table."""
    if traced.outputs is None:
        return outputs
    values = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    is_table = isinstance(next(iter(traced.outputs), None), str)
    return dict(zip(traced.outputs, values, strict=True)) if is_table else values


def some_tensor(values: Any) -> torch.Tensor:
    """A tensor, or the first of a list or table."""
    if isinstance(values, torch.Tensor):
        return values
    return next(iter(values.values() if isinstance(values, dict) else values))


class _Tracer(fx.Tracer):
    """Keeps some modules whole and notes the innermost one that could not be recorded."""

    proxy_buffer_attributes = True  # an operation on a buffer alone would be done now, once

    def __init__(self, inputs: Inputs, whole: set[str]) -> None:
        super().__init__()
        self.failed: str | None = None
        self._inputs = inputs
        self._whole = whole

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        """Only what is passed becomes an input: arguments left out keep their defaults."""
        keys = _keys(self._inputs)
        names = [f"input_{number}" for number in range(1 if keys is None else len(keys))]
        proxies = [self.create_proxy("placeholder", name, (), {}) for name in names]

        def forward(root: nn.Module, *values: fx.Proxy) -> Any:
            if isinstance(self._inputs, dict):
                return root_fn(root, **dict(zip(self._inputs, values, strict=True)))
            return root_fn(root, *values)

        return forward, [self.root, *proxies]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        code = getattr(type(m).forward, "__code__", None)
        asks_mode = code is not None and "training" in code.co_names
        is_whole = asks_mode or module_qualified_name in self._whole
        return is_whole or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            name = self.path_of_module(m)
            if self.failed is None and name not in self._whole:
                self.failed = name
            raise


def _record(model: nn.Module, inputs: Inputs) -> fx.Graph:
    whole: set[str] = set()
    while True:
        tracer = _Tracer(inputs, whole)
        try:
            return tracer.trace(model)
        except Exception as error:  # a model can raise anything
            if tracer.failed is None:
                file = getattr(sys.modules[type(model).__module__], "__file__", None)
                raise _Uncut(describe(error, file)) from error
            whole.add(tracer.failed)


def _move_attributes(graph: fx.Graph) -> None:
    """Put each parameter before its first use, so that no cut parts them."""
    for node in list(graph.nodes):
        if node.op == "get_attr" and node.users:
            next(each for each in graph.nodes if each in node.users).prepend(node)
        elif node.op == "get_attr":
            graph.erase_node(node)


class _Recorder(fx.Interpreter):
    """Notes what each node gives: what it is, its size, and whose memory was written to."""

    def run_node(self, node: fx.Node) -> Any:
        tensors: list[torch.Tensor] = []
        _each_tensor(self.fetch_args_kwargs_from_env(node), tensors.append)
        versions = [each._version for each in tensors]
        value = super().run_node(node)
        node.meta["value"] = Value.of(value)
        node.meta["writes"] = {
            each.untyped_storage().data_ptr()
            for each, version in zip(tensors, versions, strict=True)
            if each._version > version
        }
        return value


def _outcome(
    model: nn.Module, function: Callable[[], Any], mode: bool
) -> list[torch.Tensor | None]:
    """Outputs, and the gradient of the sum of their squares; twice the same random numbers."""
    with untouched(model):
        model.train(mode)
        outputs = _flat(function())
        outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
        squares = [each.square().sum() for each in outputs if each.requires_grad]
        parameters = [each for each in model.parameters() if each.requires_grad]
        if not squares or not parameters:
            return outputs
        gradients = torch.autograd.grad(sum(squares), parameters, allow_unused=True)
        return [*(each.detach() for each in outputs), *gradients]


def _alike(first: torch.Tensor | None, second: torch.Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    scale = first.abs().max().item() if first.numel() and first.dtype.is_floating_point else 0.0
    return first.shape == second.shape and torch.allclose(
        first, second, rtol=TOLERANCE, atol=TOLERANCE * scale, equal_nan=True
    )


def _keys(values: Any) -> list[Any] | None:
    """The names of a table, the places in a list, None for one tensor."""
    if isinstance(values, torch.Tensor):
        return None
    return list(values) if isinstance(values, dict) else list(range(len(values)))


def _form(outputs: Any) -> list[Any] | None:
    values = outputs.values() if isinstance(outputs, dict) else outputs
    is_list = isinstance(outputs, dict | list | tuple)
    if not isinstance(outputs, torch.Tensor) and not (
        is_list and values and all(isinstance(each, torch.Tensor) for each in values)
    ):
        raise _Uncut(
            f"it gives a {type(outputs).__name__}, not a tensor, or a list or table of tensors"
        )
    return _keys(outputs)


def _flat(outputs: Any) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """PipelineStage takes no tables."""
    if isinstance(outputs, torch.Tensor):
        return outputs
    return tuple(outputs.values() if isinstance(outputs, dict) else outputs)


def _each_tensor(values: Any, do: Callable[[torch.Tensor], Any]) -> Any:
    """`values` with all tensors in it replaced by what `do` makes of them."""
    return map_aggregate(values, lambda each: do(each) if isinstance(each, torch.Tensor) else each)


def _device(module: nn.Module) -> torch.device:
    return next((each.device for _, each in _tensors(module)), torch.device("cpu"))


def _tensors(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers under all of their names."""
    return chain(
        module.named_parameters(prefix.rstrip("."), remove_duplicate=False),
        module.named_buffers(prefix.rstrip("."), remove_duplicate=False),
    )


# -- where to cut ----------------------------------------------------------------------------------


def costs(traced: Traced, inputs: Inputs) -> list[float]:
    """Seconds of each node, forward and backward, on these inputs; zero where nothing is done."""
    with untouched(traced.model), torch.enable_grad():
        clock = _Clock(traced.model, graph=traced.graph)
        clock.run(*positional(traced, inputs))
    return [clock.seconds.get(node, 0.0) for node in traced.nodes]


def cut(
    traced: Traced,
    costs: Sequence[float],
    num_stages: int,
    asked_by: str = "layout.ranks_per_worker",
) -> list[int]:
    """The cuts that make the slowest stage fastest, and of these the ones that send least.

    Every stage gets a parameter to train. Two calls with the same arguments give the same.

    Raises:
        N3LOError: the model has too few places to cut.
    """
    seconds = [0.0, *accumulate(costs)]

    def time(begin: int, end: int) -> float:
        has_parameters = traced.num_trained[end] > traced.num_trained[begin]
        return seconds[end] - seconds[begin] if has_parameters else inf

    places = _places(traced)
    slowest, _ = _divide(places, num_stages, time, max)
    if slowest == inf:
        raise _too_many(
            asked_by,
            num_stages,
            most=sum(_divide(places, fewer, time, max)[0] < inf for fewer in range(1, num_stages)),
        )
    sent = {
        index: sum(each.meta["value"].num_bytes for each in traced.live(index)) for index in places
    }

    def traffic(begin: int, end: int) -> float:
        return sent[begin] if time(begin, end) <= slowest else inf

    return _divide(places, num_stages, traffic, operator.add)[1]


def cut_at(traced: Traced, modules: Sequence[str], num_stages: int) -> list[int]:
    """The cuts before the first operation of these modules, such as ["rho", "head"].

    Raises:
        N3LOError: a name is unknown or out of order, or a stage cannot begin there.
    """
    if len(modules) != num_stages - 1:
        raise N3LOError(
            f"{AT}: {len(modules)} names, but the ranks of a worker are {num_stages} stages; "
            f"name the {num_stages - 1} modules that begin a stage after the first"
        )
    begins = _begins(traced)
    cuts: list[int] = []
    for name in modules:
        if name not in begins:
            raise N3LOError(f"{AT}: there is no module '{name}', only {', '.join(begins)}")
        index = begins[name]
        if cuts and index <= cuts[-1]:
            raise N3LOError(f"{AT}: '{name}' does not come after the module before it")
        if why := traced.obstacle(index):
            raise N3LOError(f"{AT}: no stage can begin at '{name}': {why}")
        cuts.append(index)
    for number, (begin, end) in enumerate(pairwise([0, *cuts, len(traced.nodes)]), start=1):
        if traced.num_trained[begin] == traced.num_trained[end]:
            raise N3LOError(
                f"{AT}: {', '.join(modules)}: stage {number} of {num_stages} would have no "
                "parameters to train"
            )
    return cuts


def _too_many(asked_by: str, num_stages: int, most: int) -> N3LOError:
    if most == 0:
        return N3LOError("the model has no parameters to train")
    return N3LOError(
        f"{asked_by}: {num_stages} stages, but this model can be cut into at most "
        f"{most}, each with parameters to train and only tensors passing on; "
        f"take {most}{' or fewer' if most > 1 else ''}"
    )


class _Clock(fx.Interpreter):
    """Times every operation, and its gradient where training needs one."""

    def __init__(self, module: nn.Module, graph: fx.Graph) -> None:
        super().__init__(module, graph=graph)
        self.seconds: dict[fx.Node, float] = {}

    def run_node(self, node: fx.Node) -> Any:
        if node.op not in ("call_module", "call_function", "call_method"):
            return super().run_node(node)
        runs = [self._measure(node) for _ in range(1 + REPEATS)]
        self.seconds[node] = min(seconds for seconds, _ in runs[1:])
        return _each_tensor(runs[0][1], _leaf)

    def _measure(self, node: fx.Node) -> tuple[float, Any]:
        leaves: list[torch.Tensor] = []

        def renew(value: torch.Tensor) -> torch.Tensor:
            leaves.append(_leaf(value))
            return leaves[-1].clone()  # which the operation may write into

        args, kwargs = _each_tensor(self.fetch_args_kwargs_from_env(node), renew)
        if node.op == "call_module":
            leaves += self.fetch_attr(node.target).parameters()
        trained = [each for each in leaves if each.requires_grad]
        begin = _now(leaves)
        value = getattr(self, node.op)(node.target, args, kwargs)
        given: list[torch.Tensor] = []
        _each_tensor(value, given.append)
        given = [each for each in given if each.requires_grad]
        if given and trained:
            ones = [torch.ones_like(each) for each in given]
            torch.autograd.grad(given, trained, ones, allow_unused=True)
        return _now(leaves) - begin, value


def _leaf(value: torch.Tensor) -> torch.Tensor:
    return value.detach().requires_grad_(value.requires_grad)


def _now(tensors: Sequence[torch.Tensor]) -> float:
    if tensors and tensors[0].is_cuda:
        torch.cuda.synchronize(tensors[0].device)
    return perf_counter()


def _places(traced: Traced) -> list[int]:
    """Where a stage can begin, and the end."""
    # A parameter goes with its first use, which is the node after it.
    inner = [
        index
        for index, (before, node) in enumerate(pairwise(traced.nodes), start=1)
        if before.op != "get_attr" and node.op not in ("placeholder", "output")
    ]
    free = [index for index in inner if traced.obstacle(index) is None]
    return [0, *free, len(traced.nodes)]


def _divide(
    places: Sequence[int],
    num_stages: int,
    value: Callable[[int, int], float],
    combine: Callable[[float, float], float],
) -> tuple[float, list[int]]:
    """The cuts with the least combined value of the stages; infinite if there are none.

    Dynamic programming over the number of stages and the end of the last of them.
    """
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for _ in range(num_stages):
        longer = {}
        for end in places:
            choices = [(combine(best[at][0], value(at, end)), at) for at in best if at < end]
            if choices:
                least, begin = min(choices)
                longer[end] = least, [*best[begin][1], begin]
        best = longer
    least, begins = best.get(places[-1], (inf, [0]))
    return least, begins[1:]


def _begins(traced: Traced) -> dict[str, int]:
    """The first node of each module, in order."""
    begins: dict[str, int] = {}
    for index, node in enumerate(traced.nodes):
        while index > 0 and traced.nodes[index - 1].op == "get_attr":
            index -= 1
        for name, _ in node.meta.get("nn_module_stack", {}).values():
            begins.setdefault(name, index)
    return begins


# -- the stages ------------------------------------------------------------------------------------


def stages(traced: Traced, cuts: Sequence[int]) -> list[nn.Module]:
    """The stages, on the model's own parameters and buffers under their own names.

    Each takes the tensors live at its cut and gives those live at the next, or one alone, in the
    types and layouts that `trace` saw. The first takes `positional(inputs)`; of what the last
    gives, `restore` makes the model's output.
    """
    return [_stage(traced, cuts, index) for index in range(len(cuts) + 1)]


def examples(
    traced: Traced, stages: Sequence[nn.Module], inputs: Inputs
) -> list[tuple[torch.Tensor, ...]]:
    """What enters each stage, and what the last one gives, for inputs of this size.

    Tensors without data, for `input_args` and `output_args` of PipelineStage: left to find the
    shapes itself, it would train BatchNorm on memory that nobody has written.
    """
    values = positional(traced, inputs)
    found = [tuple(map(_empty, values))]
    for stage in stages:
        with untouched(stage), torch.enable_grad():
            values = stage(*(_leaf(each).to(_device(stage)) for each in values))
        values = (values,) if isinstance(values, torch.Tensor) else values
        found.append(tuple(map(_empty, values)))
    return found


def _empty(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(
        value.shape,
        value.stride(),
        dtype=value.dtype,
        device="meta",
        requires_grad=value.requires_grad,
    )


def _stage(traced: Traced, cuts: Sequence[int], index: int) -> fx.GraphModule:
    begin, end = [0, *cuts, len(traced.nodes)][index : index + 2]
    graph = fx.Graph()
    received = traced.live(begin)
    copies = {node: graph.placeholder(node.name) for node in received}
    for node in traced.nodes[begin:end]:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    given = traced.live(end)
    if given:
        graph.output(tuple(copies[node] for node in given))
    stage = fx.GraphModule(traced.model, graph, f"Stage{index}")
    _adopt(traced, cuts, index, stage)
    if index > 0:
        stage.register_forward_pre_hook(partial(_receive, _values(received)))
    stage.register_forward_hook(partial(_send, _values(given)) if given else _give)
    return stage


def _adopt(traced: Traced, cuts: Sequence[int], index: int, stage: nn.Module) -> None:
    """Add what no operation uses, and keep to the model's choice of buffers that are saved."""
    users = {
        key: bisect_right(cuts, position)
        for position, node in enumerate(traced.nodes)
        for name, tensor in traced.tensors(node)
        for key in (name, id(tensor))
    }
    for name, tensor in _tensors(traced.model):
        if name not in users and users.get(id(tensor), len(cuts)) == index:
            _attach(stage, name, tensor)
    saved = traced.model.state_dict().keys()
    for name, buffer in list(stage.named_buffers(remove_duplicate=False)):
        if name not in saved:
            path, _, field = name.rpartition(".")
            stage.get_submodule(path).register_buffer(field, buffer, persistent=False)


def _attach(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    *path, field = name.split(".")
    for each in path:
        if not hasattr(module, each):
            module.add_module(each, nn.Module())
        module = module.get_submodule(each)
    if isinstance(tensor, nn.Parameter):
        module.register_parameter(field, tensor)
    else:
        module.register_buffer(field, tensor)


# -- what passes from stage to stage ---------------------------------------------------------------

# Older versions of PipelineStage than torch 2.13's ask that all they receive can have a gradient,
# and gets one. So integers travel as floats of their width, bit by bit, and numbers as tensors.
CARRIERS = {1: torch.float16, 2: torch.float16, 4: torch.float32, 8: torch.float64}


class _Received(torch.autograd.Function):
    """Copies, into which a stage may write, of which each has a gradient: zero if it is unused."""

    @staticmethod
    def forward(ctx: Any, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(each.clone() for each in values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradients


def _values(nodes: Sequence[fx.Node]) -> list[Value]:
    return [node.meta["value"] for node in nodes]


def _receive(forms: Sequence[Value], stage: nn.Module, values: Sequence[torch.Tensor]) -> Any:
    trained = [each for each in values if each.requires_grad]
    copies = iter(_Received.apply(*trained) if trained else ())
    values = [next(copies) if each.requires_grad else each for each in values]
    return tuple(map(_unpack, forms, values))


def _send(forms: Sequence[Value], stage: nn.Module, inputs: Any, values: Sequence[Any]) -> Any:
    device = next(each.device for each in values if isinstance(each, torch.Tensor))
    packed = tuple(_pack(*each, device) for each in zip(forms, values, strict=True))
    return packed if len(packed) > 1 else packed[0]


def _give(stage: nn.Module, inputs: Any, outputs: Any) -> Any:
    return _flat(outputs)


def _pack(form: Value, value: Any, device: torch.device) -> torch.Tensor:
    """As floats, one after the other in memory, since this is what is sent."""
    if not isinstance(value, torch.Tensor):
        return torch.tensor(value, dtype=torch.float64, device=device)
    value = value.movedim(1, -1) if form.is_channels_last else value
    value = value.contiguous()
    if value.is_floating_point() or value.is_complex():
        return value.to(form.kind)  # the receiver expects it, whatever autocast does here
    carrier = CARRIERS[value.dtype.itemsize]
    return value.to(carrier) if value.dtype.itemsize == 1 else value.view(carrier)


def _unpack(form: Value, value: torch.Tensor) -> Any:
    kind = form.kind
    if not isinstance(kind, torch.dtype):
        return kind(value.item())
    if not kind.is_floating_point and not kind.is_complex:
        value = value.detach()
        value = value.to(kind) if kind.itemsize == 1 else value.view(kind)
    return value.movedim(-1, 1) if form.is_channels_last else value
