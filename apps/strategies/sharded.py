"""Every rank trains on its part of each batch, and keeps a part of the weights (ZeRO, FSDP)."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from apps.contract import N3LOError
from apps.strategies.divided import Divided
from apps.strategies.group import start_torch
from apps.strategies.tensor_plan import whole


class Sharded(Divided):
    """Weights, gradients and moments are divided over the ranks of a worker.

    Layers are put together when they are needed, and gradients reduced to the parts that stay
    (Rajbhandari et al. 2020, arXiv:1910.02054, stage 3, by PyTorch's `fully_shard`); so the
    arithmetic is that of `allreduce`. Several workers are copies of each other (hybrid sharding).
    """

    def connect(self) -> None:
        topology, ranks = self.topology, self.topology.ranks
        start_torch(topology.comm, topology.device)
        self.same_start()
        self.note_names()
        mesh = init_device_mesh(
            topology.device.type,
            (ranks.workers, ranks.per_worker),
            mesh_dim_names=("workers", "ranks"),
        )
        one_worker = ranks.workers == 1
        self.prepare_networks()

        def rehearse() -> None:
            self.experiment.rehearse(self.preview.example(2))

        for network in self.networks.values():
            found = units(network, rehearse, self.training.split.unit_parameters)
            for unit in [*found, network]:
                fully_shard(
                    unit, mesh=mesh["ranks"] if one_worker else mesh, reshard_after_forward=True
                )
        self.place_networks()
        self.make_optimizers()

    def gathering(self, is_last: bool) -> AbstractContextManager[Any]:
        for network in self.networks.values():
            network.set_requires_gradient_sync(is_last)
        return nullcontext()

    def squared_norm(self, network: str) -> torch.Tensor:
        parameters = self.networks[network].parameters()
        gradients = [each.grad for each in parameters if each.grad is not None]
        return whole(nn.utils.get_total_norm(gradients)) ** 2

    def sum_in_step(self, tensor: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(tensor)
        return tensor

    def close(self) -> None:
        self.topology.comm.Barrier()
        gc.collect()
        dist.destroy_process_group()


def units(network: nn.Module, rehearse: Callable[[], None], least: int) -> list[nn.Module]:
    """The smallest layers with at least so many parameters that are called as a whole.

    A layer whose weights another one reads would not be put together in time.

    Args:
        rehearse: calls the network, to see what is called, and what reads what.
    """
    with _Readers(network) as readers:
        rehearse()
    users = Counter(
        id(each) for module in network.modules() for each in module.parameters(recurse=False)
    )

    def fits(module: nn.Module) -> bool:
        parameters = list(module.parameters())
        own = all(users[id(each)] == 1 and readers.only(module, each) for each in parameters)
        return module in readers.called and own and sum(map(torch.numel, parameters)) >= least

    def found(module: nn.Module) -> Iterator[nn.Module]:
        below = [unit for child in module.children() for unit in found(child)]
        yield from below or ([module] if fits(module) else [])

    return [unit for unit in found(network) if unit is not network]


class _Readers(TorchFunctionMode):
    """Notes during a call of a network which modules are at work when a parameter is read."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.called: set[nn.Module] = set()
        self._network = network
        self._at_work: list[nn.Module] = []
        self._readers: dict[int, set[nn.Module]] = {}

    def only(self, module: nn.Module, parameter: nn.Parameter) -> bool:
        """Whether a parameter is read by the module and what is in it, and nothing else."""
        return module in self._readers.get(id(parameter), {module})

    def __enter__(self) -> _Readers:
        def begin(module: nn.Module, _: Any) -> None:
            self.called.add(module)
            self._at_work.append(module)

        modules = list(self._network.modules())
        self._hooks = [
            *(each.register_forward_pre_hook(begin) for each in modules),
            *(
                each.register_forward_hook(lambda *_: self._at_work.pop() and None)
                for each in modules
            ),
        ]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        for each in tree_leaves((args, kwargs)):
            if isinstance(each, nn.Parameter):
                at_work = set(self._at_work)
                self._readers[id(each)] = self._readers.get(id(each), at_work) & at_work
        return func(*args, **(kwargs or {}))


def check_parameters(network: nn.Module, units: Sequence[nn.Module]) -> None:
    """See that `fully_shard` will take the parameters.

    Raises:
        N3LOError: it will not.
    """
    taken: set[int] = set()
    for unit in [*units, network]:
        named = [(name, each) for name, each in network.named_parameters() if id(each) not in taken]
        inside = {id(each) for each in unit.parameters()}
        own = [(name, each) for name, each in named if id(each) in inside]
        taken |= inside
        for name, each in own:
            if each.ndim == 0:
                raise N3LOError(
                    f"training.strategy: 'sharded' divides parameters, and '{name}' is a single "
                    "number; give it the shape (1,), or use 'allreduce'"
                )
            if each.dtype != own[0][1].dtype:
                raise N3LOError(
                    f"training.strategy: 'sharded' puts parameters of one type together, but "
                    f"'{own[0][0]}' is {own[0][1].dtype} and '{name}' {each.dtype}; use 'allreduce'"
                )
