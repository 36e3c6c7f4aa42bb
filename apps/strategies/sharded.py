"""Every rank trains on its part of each batch, and keeps a part of the weights (ZeRO, FSDP)."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from apps.experiment import call
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
        for network in self.networks.values():
            inputs = self.preview.example(2).inputs
            for unit in [*units(network, inputs, self.training.split.unit_parameters), network]:
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


def units(network: nn.Module, inputs: Any, least: int) -> list[nn.Module]:
    """The smallest layers with at least so many parameters that are called as a whole.

    A layer that is not called, because another reads its weights, would not be put together.

    Args:
        inputs: of a batch, to see what is called.
    """
    called: set[nn.Module] = set()
    hooks = [
        each.register_forward_pre_hook(lambda module, _: called.add(module))
        for each in network.modules()
    ]
    was_training = network.training
    with torch.no_grad():
        call(network.eval(), inputs)
    network.train(was_training)
    for hook in hooks:
        hook.remove()
    users = Counter(
        id(each) for module in network.modules() for each in module.parameters(recurse=False)
    )

    def fits(module: nn.Module) -> bool:
        parameters = list(module.parameters())
        alone = all(users[id(each)] == 1 for each in parameters)
        return module in called and alone and sum(map(torch.numel, parameters)) >= least

    def found(module: nn.Module) -> Iterator[nn.Module]:
        below = [unit for child in module.children() for unit in found(child)]
        yield from below or ([module] if fits(module) else [])

    return [unit for unit in found(network) if unit is not network]
