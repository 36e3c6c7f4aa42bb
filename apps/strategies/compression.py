"""How the ranks take the mean of their gradients, bucket by bucket during the backward pass.

DistributedDataParallel gathers gradients in buckets and hands each to a hook when it is full. A
`Reduction` is such a hook. All give every rank the same bits. Those that send less than the whole
gradient keep what they left out and add it to the next one (error feedback).

The first step of a process has one bucket of all gradients, the later ones have several, in another
order. What a reduction remembers is therefore kept by the name of the parameter. A sum over more
than two ranks still depends in its last bit on where an entry lies in its bucket, except in `TopK`:
a resumed job gives the bits of one that went on if one backward pass precedes `load_state`.
"""

from __future__ import annotations

import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.futures import Future

from apps import contract
from apps.contract import N3LOError


class Bucket(NamedTuple):
    """Gradients of some parameters of one rank."""

    buffer: torch.Tensor  # (n,), all of them
    gradients: dict[str, torch.Tensor]  # the parts of the buffer, in their order there
    is_last: bool  # of the step


class Reduction(ABC):
    """A hook for `network.register_comm_hook(None, reduction.__call__)`: a mean over ranks.

    Args:
        group: all ranks of the mean. Nothing else may use it during a backward pass.
        network: the one whose gradients these are, not wrapped.
    """

    sent_bytes: int  # that this rank gave to collectives; what these make of it is their affair

    def __init__(self, group: dist.ProcessGroup, network: nn.Module) -> None:
        self.group = group
        self.sent_bytes = 0
        self._parameters = dict(network.named_parameters())
        self._names = {parameter: name for name, parameter in self._parameters.items()}

    # DistributedDataParallel compares the annotations of a hook, and does not know them as text.
    def __call__(self, state, bucket):
        """Begin the mean of a bucket; the future gives its buffer."""
        parts = zip(bucket.parameters(), bucket.gradients(), strict=True)
        gradients = {self._names[parameter]: gradient for parameter, gradient in parts}
        return self._start(Bucket(bucket.buffer(), gradients, bucket.is_last()))

    @abstractmethod
    def _start(self, bucket: Bucket) -> Future[torch.Tensor]:
        """See `__call__`."""

    def state(self) -> dict[str, Any]:
        """What this rank must know to go on; each rank has its own. Tensors are no copies."""
        return {"sent_bytes": self.sent_bytes}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave, to the same bits."""
        self.sent_bytes = state["sent_bytes"]

    def _own(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copies where their parameters are."""
        return {
            name: tensor.to(self._parameters[name].device, copy=True)
            for name, tensor in tensors.items()
        }


class Mean(Reduction):
    """All-reduce of the gradients as they are."""

    def _start(self, bucket: Bucket) -> Future[torch.Tensor]:
        return self._all_reduce(bucket.buffer.div_(self.group.size()))

    def _all_reduce(self, tensor: torch.Tensor) -> Future[torch.Tensor]:
        self.sent_bytes += tensor.nbytes
        work = dist.all_reduce(tensor, group=self.group, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])


class Cast(Mean):
    """All-reduce in a shorter type.

    The sum is over gradients / ranks, so that it does not overflow where they do not.

    Args:
        dtype: torch.float16 or torch.bfloat16.
    """

    def __init__(self, group: dist.ProcessGroup, network: nn.Module, dtype: torch.dtype) -> None:
        super().__init__(group, network)
        self._dtype = dtype

    def _start(self, bucket: Bucket) -> Future[torch.Tensor]:
        short = bucket.buffer.div_(self.group.size()).to(self._dtype)
        return self._all_reduce(short).then(lambda future: bucket.buffer.copy_(future.value()))


class Staged(Reduction):
    """A mean in several collectives, one after the other.

    Chained to one another's futures they would start in another order on each rank, and the few
    threads of gloo would wait for each other. Here the buckets follow one another: on a GPU in a
    stream, elsewhere in a thread, beside the backward pass in both.
    """

    def __init__(self, group: dist.ProcessGroup, network: nn.Module) -> None:
        super().__init__(group, network)
        self.num_steps = 0
        self._thread = ThreadPoolExecutor(1, type(self).__name__)

    def _start(self, bucket: Bucket) -> Future[torch.Tensor]:
        on_gpu = bucket.buffer.is_cuda
        ready = Future(devices=[bucket.buffer.device] if on_gpu else None)
        done = ready.then(lambda _: self._finish(bucket))  # on a GPU in a stream of its own
        if on_gpu:
            ready.set_result(bucket.buffer)
        else:
            self._thread.submit(ready.set_result, bucket.buffer)
        return done

    def _finish(self, bucket: Bucket) -> torch.Tensor:
        self._reduce(bucket)
        self.num_steps += bucket.is_last
        return bucket.buffer

    @abstractmethod
    def _reduce(self, bucket: Bucket) -> None:
        """Put the mean into the buffer.

        Each call runs in another stream, so that memory kept between calls is written in place:
        freed, it would be given away while a kernel of the other stream still reads it.
        """

    def _mean(self, tensor: torch.Tensor) -> None:
        """The mean over ranks, in place."""
        dist.all_reduce(tensor.div_(self.group.size()), group=self.group)
        self.sent_bytes += tensor.nbytes

    def state(self) -> dict[str, Any]:
        return {**super().state(), "num_steps": self.num_steps}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self.num_steps = state["num_steps"]


class Hierarchical(Staged):
    """Sum within each worker to its first rank, sum over these, then back to all.

    With n bytes of gradients every rank sends n within its worker. The first sends n once more
    there, and across workers n in the type of `wire`.

    Args:
        inner: the ranks of this rank's worker.
        outer: the first ranks of all workers; None on the other ranks.
        wire: the type across workers; None = that of the gradients.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        network: nn.Module,
        inner: dist.ProcessGroup,
        outer: dist.ProcessGroup | None,
        wire: torch.dtype | None = None,
    ) -> None:
        super().__init__(group, network)
        self._inner, self._outer, self._wire = inner, outer, wire
        self._first = dist.get_global_rank(inner, 0)
        self.outer_bytes = 0

    @property
    def inner_bytes(self) -> int:
        return self.sent_bytes - self.outer_bytes

    def _reduce(self, bucket: Bucket) -> None:
        mean = bucket.buffer.div_(self.group.size())
        dist.reduce(mean, self._first, group=self._inner)
        self.sent_bytes += mean.nbytes
        if self._outer is not None:
            self._cross(mean, self._outer)
            self.sent_bytes += mean.nbytes
        dist.broadcast(mean, self._first, group=self._inner)

    def _cross(self, mean: torch.Tensor, outer: dist.ProcessGroup) -> None:
        sent = mean.to(self._wire or mean.dtype)
        dist.all_reduce(sent, group=outer)
        mean.copy_(sent)
        self.outer_bytes += sent.nbytes
        self.sent_bytes += sent.nbytes

    def state(self) -> dict[str, Any]:
        return {**super().state(), "outer_bytes": self.outer_bytes}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self.outer_bytes = state["outer_bytes"]


class PowerSgd(Staged):
    """A low-rank approximation of each gradient (Vogels et al. 2019, arXiv:1905.13727).

    Seen as a matrix M (n, m), with its first axis as rows, a gradient g of this rank is sent as

        M = g + e,  P = mean(M Q),  P̂ = orthogonal(P),  Q = mean(Mᵀ P̂),  g' = P̂ Qᵀ,  e = M - g'

    where g' is what all ranks get, e is the error that this rank keeps, and Q (m, rank) is that of
    the step before: one step of a power iteration. Q begins as standard normal numbers, drawn by a
    CPU generator seeded with the CRC-32 of the parameter's name. (n + m) rank entries are sent
    where that is less than n m; other gradients are sent whole. All is float32, or float64 for
    parameters of that type.

    torch's own powerSGD_hook waits within the callbacks of gloo, which stops with several buckets,
    and keeps its errors by the number of a bucket, which a resumed job cannot use.

    Args:
        rank: of the approximation.
        start_after: so many steps send whole gradients first.
    """

    def __init__(
        self, group: dist.ProcessGroup, network: nn.Module, rank: int, start_after: int = 0
    ) -> None:
        super().__init__(group, network)
        if rank < 1:
            raise N3LOError(f"powersgd_rank: {rank} is not at least 1")
        self._rank, self._start_after = rank, start_after
        self._errors: dict[str, torch.Tensor] = {}  # (n, m)
        self._factors: dict[str, torch.Tensor] = {}  # Q, (m, rank)

    def _reduce(self, bucket: Bucket) -> None:
        if self.num_steps < self._start_after:
            self._mean(bucket.buffer)
            return
        matrices = {
            name: self._corrected(name, gradient)
            for name, gradient in bucket.gradients.items()
            if self._pays(gradient)
        }
        whole = [each for name, each in bucket.gradients.items() if name not in matrices]
        products = [matrix @ self._factors[name] for name, matrix in matrices.items()]
        means = self._means([*products, *map(wide, whole)])
        for gradient, mean in zip(whole, means[len(products) :], strict=True):
            gradient.copy_(mean)
        if not matrices:
            return
        bases = [torch.linalg.qr(mean).Q for mean in means[: len(products)]]
        factors = self._means(
            [matrix.T @ basis for matrix, basis in zip(matrices.values(), bases, strict=True)]
        )
        for (name, matrix), basis, factor in zip(matrices.items(), bases, factors, strict=True):
            gradient = bucket.gradients[name]
            gradient.copy_((basis @ factor.T).view_as(gradient))
            # What the gradient's own type loses of g' comes back, too.
            torch.sub(matrix, gradient.flatten(1), out=self._errors[name])
            self._factors[name].copy_(factor)

    def _pays(self, gradient: torch.Tensor) -> bool:
        if gradient.ndim < 2:
            return False
        rows, columns = len(gradient), math.prod(gradient.shape[1:])
        return (rows + columns) * self._rank < rows * columns

    def _corrected(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient with what was left out before, (n, m)."""
        matrix = wide(gradient.flatten(1))
        if name not in self._errors:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            start = torch.randn(matrix.shape[1], self._rank, generator=generator)
            self._factors[name] = start.to(matrix)
            self._errors[name] = torch.zeros_like(matrix)
        return matrix + self._errors[name]

    def _means(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The means over ranks, sent together.

        Each gets memory of its own: where it lies in the message, and so in a bucket, must not
        change the order of sums within a matrix product.
        """
        message = torch.cat([tensor.flatten() for tensor in tensors])
        self._mean(message)
        parts = message.split([tensor.numel() for tensor in tensors])
        return [part.clone().view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]

    def state(self) -> dict[str, Any]:
        return {**super().state(), "errors": self._errors, "factors": self._factors}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self._errors = self._own(state["errors"])
        self._factors = self._own(state["factors"])


class TopK(Staged):
    """The largest entries of each gradient, and what is left of the others later.

    Stich et al. 2018 (arXiv:1809.07599); with `momentum` m, Lin et al. 2018 (deep gradient
    compression, arXiv:1712.01887, sections 3.2 and 3.3). This rank's gradient g of a parameter
    goes into its residual r, of which the k = ⌈density n⌉ entries largest in magnitude are sent:

        u = m u + g,  r = r + u,  send r at the k places,  r = 0 and u = 0 there

    Without momentum u is g. With it the optimizer must have none of its own, nor scale gradients:
    plain SGD. All ranks get the sum of what was sent, in the order of ranks, over their number.

    A rank sends 8 k bytes for a parameter, values in float32 and places in int32 (12 k if it is
    float64), and the values alone of one below `min_size` entries. It gets those of all ranks: with
    R ranks the mean takes less of the network than `Mean` while density < 1 / R, about. The
    places are those in a bucket, so that a network has at most 2³¹ entries.

    Args:
        density: share of the entries that is sent; may be set anew between steps.
        min_size: parameters of fewer entries are sent whole.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        network: nn.Module,
        density: float,
        momentum: float = 0.0,
        min_size: int = 1024,
    ) -> None:
        super().__init__(group, network)
        if not 0 < density <= 1:
            raise N3LOError(f"topk_density: {density} is not above 0 and at most 1")
        self.density = density
        self._momentum, self._min_size = momentum, min_size
        self._residuals: dict[str, torch.Tensor] = {}  # (n,)
        self._velocities: dict[str, torch.Tensor] = {}  # u, (n,)

    def _reduce(self, bucket: Bucket) -> None:
        chosen, whole = [], []  # of each parameter: values, and their places in the buffer
        start = 0
        for name, gradient in bucket.gradients.items():
            update = self._with_momentum(name, wide(gradient.flatten()))
            if len(update) < self._min_size:
                whole.append((update, torch.arange(len(update), device=update.device) + start))
            else:
                values, places = self._largest(name, update)
                chosen.append((values, places + start))
            start += len(update)
        values = self._gather(torch.cat([values for values, _ in (*chosen, *whole)]))
        told: list[list[torch.Tensor]] = [[] for _ in values]  # places, by each rank
        if chosen:
            places = torch.cat([places for _, places in chosen]).to(torch.int32)
            told = [[each] for each in self._gather(places)]
        known = [places for _, places in whole]  # to all ranks
        total = torch.zeros(start, dtype=values[0].dtype, device=bucket.buffer.device)
        for of_rank, at in zip(values, told, strict=True):
            total.index_add_(0, torch.cat([*at, *known]), of_rank)
        bucket.buffer.copy_(total.div_(self.group.size()))

    def _with_momentum(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        if not self._momentum:
            return gradient
        velocity = kept(self._velocities, name, gradient)
        return velocity.mul_(self._momentum).add_(gradient)

    def _largest(self, name: str, update: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Take the largest entries out of the residual: their values and places, (k,) each."""
        residual = kept(self._residuals, name, update).add_(update)
        count = math.ceil(self.density * len(residual))
        places = residual.abs().topk(count, sorted=False).indices
        values = residual[places]
        residual.index_fill_(0, places, 0)  # an assignment would wait for the GPU
        if self._momentum:
            self._velocities[name].index_fill_(0, places, 0)
        return values, places

    def _gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks, in their order."""
        tensors = [torch.empty_like(tensor) for _ in range(self.group.size())]
        dist.all_gather(tensors, tensor, group=self.group)
        self.sent_bytes += tensor.nbytes
        return tensors

    def state(self) -> dict[str, Any]:
        residuals = {"residuals": self._residuals, "velocities": self._velocities}
        return {**super().state(), **residuals}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self._residuals = self._own(state["residuals"])
        self._velocities = self._own(state["velocities"])


def make_reduction(
    settings: contract.Reduction,
    group: dist.ProcessGroup,
    network: nn.Module,
    inner: dist.ProcessGroup | None = None,
    outer: dist.ProcessGroup | None = None,
) -> Reduction:
    """The reduction that a study asks for; `inner` and `outer` are of `Hierarchical`."""
    half = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(settings.compression)
    if settings.hierarchical:
        assert inner is not None
        return Hierarchical(group, network, inner, outer, half)
    if half is not None:
        return Cast(group, network, half)
    if settings.compression == "powersgd":
        return PowerSgd(group, network, settings.powersgd_rank, settings.powersgd_start_after)
    if settings.compression == "topk":
        return TopK(group, network, settings.topk_density, settings.topk_momentum)
    return Mean(group, network)


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in float32, or float64 if it is that."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32), copy=True)


def kept(tensors: dict[str, torch.Tensor], name: str, like: torch.Tensor) -> torch.Tensor:
    """What is kept under this name; zeros at first."""
    if name not in tensors:
        tensors[name] = torch.zeros_like(like)
    return tensors[name]
