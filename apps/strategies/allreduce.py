"""Every rank trains on its part of each batch, and all move by the mean gradient.

Two ranks then do the arithmetic of one rank with a batch twice as large.
"""

from __future__ import annotations

import importlib
import inspect
import os
import socket
import sys
from datetime import timedelta

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from apps.contract import N3LOError
from apps.strategies.local import Local

TIMEOUT = timedelta(seconds=300)  # the first import of a slow file system can take a minute

# Rank 0's statistics shall not overwrite the others' in every step: they are averaged at the end
# of an epoch. PyTorch 2.13 renamed the option, and warns of the old name.
_RENAMED = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
_OWN_BUFFERS = {"forward_sync_buffers" if _RENAMED else "broadcast_buffers": False}


class Horovod(Local):
    """The mean comes from Horovod: MPI, or NCCL where it was built with it."""

    def connect(self) -> None:
        try:
            self._hvd = importlib.import_module("horovod.torch")
        except ImportError as error:
            raise N3LOError(
                "Horovod is not installed: run 'make setup', or set training.backend = \"ddp\""
            ) from error
        self._hvd.init(comm=self.topology.comm)
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
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=self._meet(),
            rank=self.topology.rank,
            world_size=self.topology.num_ranks,
            timeout=TIMEOUT,
        )
        self.networks = {
            name: DistributedDataParallel(
                network, device_ids=[device] if device.type == "cuda" else None, **_OWN_BUFFERS
            )
            for name, network in self.networks.items()
        }

    def _meet(self) -> dist.TCPStore:
        """A store in rank 0 on a port that the system picks, so that two tasks never collide."""
        one_host = len(set(self.topology.hosts)) == 1
        if one_host and sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        host = "127.0.0.1" if one_host else self.topology.hosts[0]

        def store(port: int, listener: socket.socket | None) -> dist.TCPStore:
            return dist.TCPStore(
                host,
                port,
                self.topology.num_ranks,
                listener is not None,
                TIMEOUT,
                wait_for_workers=False,
                master_listen_fd=listener.detach() if listener else None,
            )

        # Left to itself, the store would listen on all interfaces.
        listener = socket.create_server((host, 0)) if self.topology.is_first else None
        port = self.topology.from_first(lambda: listener.getsockname()[1])
        return store(port, listener)

    def close(self) -> None:
        self.topology.comm.Barrier()
        dist.destroy_process_group()
