"""Every rank trains on its part of each batch, and all move by the mean gradient.

Two ranks then do the arithmetic of one rank with a batch twice as large.
"""

from __future__ import annotations

import gc
import inspect

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from apps.strategies.group import start_horovod, start_torch
from apps.strategies.local import Local

# Rank 0's statistics shall not overwrite the others' in every step: they are averaged at the end
# of an epoch. PyTorch 2.13 renamed the option, and warns of the old name.
_RENAMED = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
_OWN_BUFFERS = {"forward_sync_buffers" if _RENAMED else "broadcast_buffers": False}


class Horovod(Local):
    """The mean comes from Horovod: MPI, or NCCL where it was built with it."""

    def connect(self) -> None:
        self._hvd = start_horovod(self.topology.comm)
        for name, network in self.networks.items():
            self._hvd.broadcast_parameters(network.state_dict(), root_rank=0)
            # Networks may share names of parameters, but all of Horovod's names must differ.
            named = [(f"{name}.{key}", each) for key, each in network.named_parameters()]
            self.optimizers[name] = self._hvd.DistributedOptimizer(
                self.optimizers[name], named_parameters=named
            )

    def apply(self, network: str) -> None:
        optimizer = self.optimizers[network]
        optimizer.synchronize()
        self.clip(network)
        with optimizer.skip_synchronize():
            optimizer.step()

    def close(self) -> None:
        self.topology.comm.Barrier()  # the first rank to shut down stops Horovod on all of them
        self._hvd.shutdown()


class Ddp(Local):
    """The mean comes from torch.distributed: gloo on CPUs, NCCL on GPUs."""

    def connect(self) -> None:
        device = self.topology.device
        start_torch(self.topology.comm, device)
        self.networks = {
            name: DistributedDataParallel(
                network, device_ids=[device] if device.type == "cuda" else None, **_OWN_BUFFERS
            )
            for name, network in self.networks.items()
        }

    def close(self) -> None:
        self.topology.comm.Barrier()
        # The wrappers must not be the last to hold the process group: its end would wait for a
        # thread that waits for Python, which they hold.
        self.networks = self.experiment.networks
        gc.collect()
        dist.destroy_process_group()
