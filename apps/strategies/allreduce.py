"""Every rank trains on its part of each batch, and all move by the mean gradient.

Two ranks then do the arithmetic of one rank with a batch twice as large.

With `average_every` = H > 1 only the ranks of a worker do so: workers train apart, and after every
H updates take the mean of their weights (local SGD, Stich 2019, arXiv:1805.09767).
"""

from __future__ import annotations

import gc
import inspect
from collections import Counter
from collections.abc import Collection
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from apps.clock import Mark
from apps.contract import N3LOError
from apps.data import Epoch
from apps.experiment import untouched
from apps.strategies.compression import Reduction, make_reduction
from apps.strategies.group import import_horovod, start_torch
from apps.strategies.local import Local

# Rank 0's statistics shall not overwrite the others' in every step: they are averaged at the end
# of an epoch. PyTorch 2.13 renamed the option, and warns of the old name.
_RENAMED = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
_OWN_BUFFERS = {"forward_sync_buffers" if _RENAMED else "broadcast_buffers": False}


class AllReduce(Local):
    """What both back ends have in common."""

    def train(self, epoch: Epoch) -> torch.Tensor:
        self._updates: Counter[str] = Counter()
        self._sent_before = self.sent_bytes()
        sums = super().train(epoch)
        for name in self.networks:
            if self._every > 1 and self._updates[name] % self._every:
                self._average_weights(name)
        return sums

    @property
    def _every(self) -> int:
        return self.training.reduction.average_every

    @property
    def _averages_gradients(self) -> bool:
        """Whether there is another rank to share a gradient with."""
        return self.num_averaged > 1

    @property
    def num_averaged(self) -> int:
        ranks = self.topology.ranks
        return ranks.per_worker if self._every > 1 else ranks.total

    def move(self, network: str) -> None:
        super().move(network)
        if self._every > 1:
            self._updates[network] += 1
            if self._updates[network] % self._every == 0:
                self._average_weights(network)

    def _average_weights(self, name: str) -> None:
        network = self.experiment.networks[name]
        parameters = [each for each in network.parameters() if each.requires_grad]
        with torch.no_grad(), self.clock.waiting("communication"):
            flat = torch.cat([each.reshape(-1) for each in parameters])
            self.average_over_all(flat)
            means = flat.split([each.numel() for each in parameters])
            for parameter, mean in zip(parameters, means, strict=True):
                parameter.copy_(mean.view_as(parameter))
        self._sent += flat.nbytes

    _sent = 0  # bytes of weights

    def average_over_all(self, vector: torch.Tensor) -> None:
        """The mean over all ranks, in place."""
        raise NotImplementedError

    def sent_bytes(self) -> int:
        """What this rank has given to the network since the start, for gradients and weights."""
        return self._sent

    def facts(self) -> dict[str, float]:
        sent = self.topology.comm.allreduce(self.sent_bytes() - self._sent_before)
        return {"sent_bytes": sent // self.topology.num_ranks}

    # Between two averages of weights, each worker's optimizer has moments of its own, and in half
    # precision a scale of its own.

    def own_state(self) -> dict[str, Any]:
        if self._every == 1 or self.topology.is_first:
            return {}
        return {
            kind: {name: each.state_dict() for name, each in self.parts[kind].items()}
            for kind in ("optimizers", "scalers")
        }

    def choose_own(self, states: dict[str, Any], own: dict[str, Any]) -> None:
        for kind in own.keys() & {"optimizers", "scalers"}:
            states[kind].update(own[kind])


class Horovod(AllReduce):
    """The mean comes from Horovod: MPI, or NCCL where it was built with it."""

    def connect(self) -> None:
        comm, worker = self.topology.comm, self.topology.place.worker
        hvd = self._hvd = import_horovod()
        groups = self.topology.worker_groups if self._every > 1 else []
        sets = [hvd.ProcessSet(list(ranks)) for ranks in groups]
        hvd.init(comm=comm, process_sets=sets)
        self._step_set = sets[worker] if sets else hvd.global_process_set
        self.prepare_networks()
        self.place_networks()
        self.make_optimizers()
        for name, network in self.networks.items():
            hvd.broadcast_parameters(network.state_dict(), root_rank=0)
            if self._averages_gradients and not self._uses_adasum:
                self.optimizers[name] = self._averaging(name)

    def _averaging(self, network: str) -> Optimizer:
        """An optimizer that averages each gradient once it is there."""
        # Networks may share names of parameters, but all of Horovod's names must differ.
        parameters = self.networks[network].named_parameters()
        named = [(f"{network}.{key}", each) for key, each in parameters]
        plain = self.optimizers[network]
        averaging = self._hvd.DistributedOptimizer(
            plain,
            named_parameters=named,
            compression=self._compression,
            backward_passes_per_step=self.training.accumulate,
            process_set=self._step_set,
        )
        # It is made anew from the parameter groups alone; some optimizers keep settings elsewhere.
        for name, value in vars(plain).items():
            if not name.startswith("_") and name not in ("param_groups", "state", "defaults"):
                setattr(averaging, name, value)
        return averaging

    @property
    def _compression(self) -> Any:
        offered = self._hvd.Compression
        return offered.fp16 if self.training.reduction.compression == "fp16" else offered.none

    @property
    def _uses_adasum(self) -> bool:
        return self.training.reduction.operation == "adasum" and self._averages_gradients

    def reduce(self, network: str) -> None:
        if not self._averages_gradients:
            return
        with self.clock.waiting("communication"):
            if self._uses_adasum:
                self._combine(network)
            else:
                self.optimizers[network].synchronize()
        half = self._compression is self._hvd.Compression.fp16
        for each in self._trained(network).values():
            self._sent += each.numel() * (2 if half else each.element_size())

    def _combine(self, network: str) -> None:
        """Adasum of the gradients (Maleki et al. 2021, arXiv:2006.02924), layer by layer.

        Of two: (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b. Where they are orthogonal it is their
        sum, where they are equal their mean.
        """
        handles = []
        for key, parameter in self._trained(network).items():
            small, context = self._compression.compress(parameter.grad)
            name = f"{network}.{key}"
            handle = self._hvd.allreduce_async(small, name=name, op=self._hvd.Adasum)
            handles.append((parameter, handle, context))
        for parameter, handle, context in handles:
            whole = self._compression.decompress(self._hvd.synchronize(handle), context)
            parameter.grad.copy_(whole)

    def _trained(self, network: str) -> dict[str, nn.Parameter]:
        named = self.networks[network].named_parameters()
        return {key: each for key, each in named if each.grad is not None}

    def move(self, network: str) -> None:
        if not self._averages_gradients or self._uses_adasum:
            super().move(network)
        else:
            with self.optimizers[network].skip_synchronize():
                super().move(network)

    def sum_in_step(self, tensor: torch.Tensor) -> torch.Tensor:
        name = f"batch_norm.{len(tensor)}"
        return self._hvd.allreduce(tensor, op=self._hvd.Sum, name=name, process_set=self._step_set)

    def average_over_all(self, vector: torch.Tensor) -> None:
        self._hvd.allreduce_(vector, op=self._hvd.Average, name="weights")

    def close(self) -> None:
        self.topology.comm.Barrier()  # the first rank to shut down stops Horovod on all of them
        self._hvd.shutdown()


class Ddp(AllReduce):
    """The mean comes from torch.distributed: gloo on CPUs, NCCL on GPUs."""

    _computed: Mark | None = None

    def connect(self) -> None:
        topology = self.topology
        start_torch(topology.comm, topology.device)
        self._step_group = self._new_group() if self._every > 1 else dist.group.WORLD
        self.prepare_networks()
        self.place_networks()
        for network in self.networks.values():
            for tensor in network.state_dict().values():
                dist.broadcast(tensor, src=0)
        self._reductions: dict[str, Reduction] = {}
        if self._averages_gradients:
            leaves_out = self._leaving_some_out()
            self.networks = {
                name: self._wrapped(name, leaves_out) for name in self.experiment.networks
            }
        self.make_optimizers()

    def _wrapped(self, name: str, leaves_out: Collection[str]) -> nn.Module:
        devices = self.topology.devices
        one_gpu = devices[0].type == "cuda" and len(devices) == 1
        network = DistributedDataParallel(
            self.experiment.networks[name],
            device_ids=devices if one_gpu else None,
            process_group=self._step_group,
            find_unused_parameters=name in leaves_out,
            **_OWN_BUFFERS,
        )
        reduction = self._reductions[name] = self._new_reduction(self.experiment.networks[name])

        # Without annotations: DDP compares them with types, and they are text here.
        def reduce(state, bucket):
            if bucket.is_last():
                self._computed = self.clock.mark()
            return reduction(state, bucket)

        network.register_comm_hook(None, reduce)
        return network

    def _leaving_some_out(self) -> set[str]:
        """The networks with parameters that get no gradient, for which DDP would wait."""
        networks, found = self.experiment.networks, set()
        batch = self.preview.example(2).to(self.topology.device)
        with ExitStack() as unchanged:
            unchanged.enter_context(torch.compiler.set_stance("force_eager"))  # of another size
            for network in networks.values():
                unchanged.enter_context(untouched(network))
            for update in self.experiment.updates(networks, batch):
                parameters = networks[update.network].parameters()
                trained = [each for each in parameters if each.requires_grad]
                gradients = torch.autograd.grad(update.loss, trained, allow_unused=True)
                if any(each is None for each in gradients):
                    found.add(update.network)
        return found

    def train(self, epoch: Epoch) -> torch.Tensor:
        try:
            return super().train(epoch)
        except RuntimeError as error:
            if "Expected to have finished reduction" not in str(error):
                raise
            raise N3LOError(
                "training.backend: 'ddp' waits for the gradient of every parameter, and this "
                "model leaves some out in some steps; use 'horovod'"
            ) from error

    def _new_reduction(self, network: nn.Module) -> Reduction:
        settings = self.training.reduction
        # Its collectives and those of BatchNorm come in no common order.
        group = self._new_group() if self._every > 1 else dist.new_group()
        if not settings.hierarchical:
            return make_reduction(settings, group, network)
        inner = self._new_group()
        firsts = [ranks[0] for ranks in self.topology.worker_groups]
        outer = dist.new_group(firsts)
        is_first = self.topology.rank in firsts
        return make_reduction(settings, group, network, inner, outer if is_first else None)

    def _new_group(self) -> dist.ProcessGroup:
        """The ranks of this rank's worker; collective over all."""
        groups = [dist.new_group(list(ranks)) for ranks in self.topology.worker_groups]
        return groups[self.topology.place.worker]

    def gathering(self, is_last: bool) -> AbstractContextManager[Any]:
        without = ExitStack()
        if not is_last and self._averages_gradients:
            for network in self.networks.values():
                without.enter_context(network.no_sync())
        return without

    def backward(self, network: str, loss: torch.Tensor) -> None:
        super().backward(network, loss)
        if self._computed is not None:
            self.clock.note("communication", self._computed)
            self._computed = None

    def sum_in_step(self, tensor: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(tensor, group=self._step_group)
        return tensor

    def average_over_all(self, vector: torch.Tensor) -> None:
        dist.all_reduce(vector)
        vector /= self.topology.num_ranks

    def sent_bytes(self) -> int:
        return self._sent + sum(each.sent_bytes for each in self._reductions.values())

    def own_state(self) -> dict[str, Any]:
        states = {name: each.state() for name, each in self._reductions.items()}
        return {**super().own_state(), "reductions": states}

    def load_own_state(self, state: dict[str, Any]) -> None:
        for name, saved in state.get("reductions", {}).items():
            self._reductions[name].load_state(saved)

    def close(self) -> None:
        self.topology.comm.Barrier()
        # The wrappers must not be the last to hold the process group: its end would wait for a
        # thread that waits for Python, which they hold.
        self.networks = self.experiment.networks
        self._reductions, self._step_group = {}, None
        gc.collect()
        dist.destroy_process_group()
