"""The ranks of a worker divide the layers of a model, and train on the same batch."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from apps.strategies.divided import Divided
from apps.strategies.group import start_torch
from apps.strategies.tensor_plan import (
    give_gradients,
    local,
    parts_of,
    plan_of,
    split,
    total_norm,
)


class InParts(Divided):
    """Parameters may be DTensors; optimizers see what this rank holds of them."""

    _mesh: DeviceMesh  # with the dimensions "workers" and "ranks"

    def make_optimizers(self) -> None:
        parts = {}
        for name, network in self.networks.items():
            trained = [each for each in network.parameters() if each.requires_grad]
            parts[name] = parts_of(trained)
        self.optimizers = self.experiment.optimizers(parts)
        self.make_scalers()

    def reduce(self, network: str) -> None:
        parameters = [each for each in self.networks[network].parameters() if each.requires_grad]
        parts = self.optimizers[network].param_groups[0]["params"]
        give_gradients(parameters, parts)
        with self.clock.waiting("communication"):
            average_gradients(parts, self.workers_group)

    @property
    def workers_group(self) -> dist.ProcessGroup:
        """The ranks of all workers that hold the same part."""
        return self._mesh["workers"].get_group()

    def squared_norm(self, network: str) -> torch.Tensor:
        parameters = [each for each in self.networks[network].parameters() if each.requires_grad]
        return total_norm(parameters, self.optimizers[network].param_groups[0]["params"]) ** 2

    @property
    def num_averaged(self) -> int:
        return self.topology.ranks.workers

    @property
    def seed_key(self) -> int:
        return self.topology.place.worker

    def of_part(self, moment: torch.Tensor) -> torch.Tensor:
        return local(moment)

    def close(self) -> None:
        self.topology.comm.Barrier()
        self.networks = {}
        gc.collect()
        dist.destroy_process_group()


class Tensor(InParts):
    """Columns or rows of each Linear layer on each rank (Shoeybi et al. 2019, arXiv:1909.08053).

    Several workers train on parts of each batch, as with `allreduce`.
    """

    def connect(self) -> None:
        topology, ranks = self.topology, self.topology.ranks
        start_torch(topology.comm, topology.device)
        self.same_start()
        self.note_names()
        self._mesh = init_device_mesh(
            topology.device.type,
            (ranks.workers, ranks.per_worker),
            mesh_dim_names=("workers", "ranks"),
        )
        given = self.training.split.tensor
        plans = topology.from_first(
            lambda: {
                name: plan_of(network, self.preview.example(2).inputs, ranks.per_worker, given)
                for name, network in self.networks.items()
            }
        )
        self.prepare_networks()
        self.place_networks()
        for name, network in self.networks.items():
            split(network, self._mesh["ranks"], plans[name])
        self.make_optimizers()

    def sum_in_step(self, tensor: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(tensor, group=self.workers_group)
        return tensor


def average_gradients(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Give all ranks of a group the mean of their gradients; collective over it."""
    gradients = [each.grad for each in parameters if each.grad is not None]
    if group.size() == 1 or not gradients:
        return
    flat = torch.cat([each.flatten() for each in gradients])
    dist.all_reduce(flat, group=group)
    flat /= group.size()
    for gradient, mean in zip(
        gradients, flat.split([each.numel() for each in gradients]), strict=True
    ):
        gradient.copy_(mean.view_as(gradient))
