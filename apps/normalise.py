"""BatchNorm over the events of all ranks, on CPUs and GPUs and with any backend.

PyTorch's own SyncBatchNorm needs GPUs and torch.distributed. This one needs a function that sums
a vector over the ranks, and is called once in a layer's forward pass and once in its backward pass.
Ioffe and Szegedy 2015, https://arxiv.org/abs/1502.03167, section 3 and algorithm 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from apps.contract import N3LOError

Sum = Callable[[torch.Tensor], torch.Tensor]


def synchronise(network: nn.Module, sum_over_ranks: Sum) -> nn.Module:
    """Have every BatchNorm layer of a network take its statistics from the events of all ranks.

    The layers stay the same objects with the same names, parameters and buffers; in eval mode they
    do as before, without the other ranks. All ranks must run the same layers in the same order, but
    may have any numbers of events, also none. Every rank propagates the gradient of its own loss:
    what reaches the input is that of the sum of all ranks' losses, and a weight or bias has this
    rank's part of it.

    Args:
        sum_over_ranks: gives the sum of all ranks' vectors of shape (n,), with the same bits on
            all ranks; it may work in place. float64 forward, and float32 backward unless the
            layer computes in float64. One vector is under way at a time, so that Horovod needs no
            name but `f"batch_norm.{len(vector)}"`.

    Returns:
        The network itself.

    Raises:
        N3LOError: a BatchNorm of another kind, whose arithmetic is not known here.
    """
    normalise = torch.compiler.disable(_Normalise.apply)  # no compiler knows sums over ranks
    for name, layer in network.named_modules():
        if not isinstance(layer, _BatchNorm) or isinstance(layer, nn.SyncBatchNorm):
            continue
        if not isinstance(layer, _Synchronised):
            if type(layer) not in _SYNCHRONISED:
                raise N3LOError(
                    f"training.sync_batchnorm: layer '{name}' is a {type(layer).__name__}; only "
                    "BatchNorm1d, BatchNorm2d and BatchNorm3d themselves can be synchronised"
                )
            layer.__class__ = _SYNCHRONISED[type(layer)]
        layer.normalise = normalise
        # A function, which copy.deepcopy of the network leaves alone: a bound method it would
        # follow to the communicator.
        layer.sum_over_ranks = lambda vector: sum_over_ranks(vector)
    return network


class _Synchronised(_BatchNorm):
    """What the three layers below share."""

    sum_over_ranks: Sum
    normalise: Callable[..., torch.Tensor]

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Values of shape (events, num_features, ...)."""
        if not self.training:
            return super().forward(values)
        self._check_input_dim(values)
        return self.normalise(values, self.weight, self.bias, self)

    def measure(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Mean and biased variance of all ranks' values (num_features,), and their count ().

        float64: a mean far from zero would else cancel what the ranks differ by, and float32
        cannot count the voxels of a large batch.
        """
        count = values.numel() // values.shape[1]
        if count > 0:
            mean, variance = torch.batch_norm_update_stats(values, None, None, 0.0)
        else:
            mean = variance = values.new_zeros(values.shape[1])
        mean, variance = mean.double(), variance.double()
        own = [count * mean, count * (variance + mean.square()), mean.new_full((1,), count)]
        total = self.sum_over_ranks(torch.cat(own))
        mean, mean_square = (total[:-1] / total[-1]).chunk(2)
        return mean, (mean_square - mean.square()).clamp(min=0.0), total[-1]

    def track(self, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor) -> None:
        """Update the running statistics."""
        if self.running_mean is None or not self.track_running_stats:
            return
        self.num_batches_tracked += 1
        # Costs a sync point on a GPU, as in PyTorch.
        momentum = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = variance * count / (count - 1).clamp(min=1.0)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)


class SynchronisedBatchNorm1d(_Synchronised, nn.BatchNorm1d):
    pass


class SynchronisedBatchNorm2d(_Synchronised, nn.BatchNorm2d):
    pass


class SynchronisedBatchNorm3d(_Synchronised, nn.BatchNorm3d):
    pass


_SYNCHRONISED = {
    nn.BatchNorm1d: SynchronisedBatchNorm1d,
    nn.BatchNorm2d: SynchronisedBatchNorm2d,
    nn.BatchNorm3d: SynchronisedBatchNorm3d,
}


class _Normalise(torch.autograd.Function):
    """y = weight (x - mean) / sqrt(variance + eps) + bias, where mean and variance depend on x.

    With x̂ = (x - mean) / sqrt(variance + eps) and N values of a feature on all ranks,
    dx = weight / sqrt(variance + eps) (dy - Σdy / N - x̂ Σ(dy x̂) / N).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        layer: _Synchronised,
    ) -> torch.Tensor:
        # Half precision has too few digits for sums over a batch.
        dtype = torch.promote_types(x.dtype, torch.float32)
        mean, variance, count = layer.measure(x.to(dtype))
        layer.track(mean, variance, count)
        mean, variance, count = mean.to(dtype), variance.to(dtype), count.to(dtype)
        ctx.save_for_backward(x, weight, mean, (variance + layer.eps).rsqrt(), count)
        ctx.sum_over_ranks = layer.sum_over_ranks
        weight, bias = (each if each is None else each.to(dtype) for each in (weight, bias))
        return functional.batch_norm(x, mean, variance, weight, bias, eps=layer.eps)

    @staticmethod
    @once_differentiable  # a second derivative would need one more sum over the ranks
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, inverse_std, count = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        dy_xhat, dy_sum = _sums(dy, x, mean, inverse_std)  # (num_features,) each
        dx = None
        if needs_x:
            total = ctx.sum_over_ranks(torch.cat([dy_xhat, dy_sum])) / count
            mean_dy_xhat, mean_dy = total.chunk(2)
            scale = inverse_std if weight is None else inverse_std * weight
            shape = (-1, *[1] * (x.ndim - 2))
            # In place, as large temporaries cost more time than the arithmetic.
            dx = x - mean.view(shape)
            dx *= (-scale * inverse_std * mean_dy_xhat).view(shape)
            dx -= (scale * mean_dy).view(shape)
            dx = dx.addcmul_(dy, scale.view(shape)).to(x.dtype)
        return (
            dx,
            dy_xhat.to(weight.dtype) if needs_weight else None,
            dy_sum.to(weight.dtype) if needs_bias else None,
            None,
        )


def _sums(
    dy: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, inverse_std: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's Σ(dy x̂) and Σdy of each feature, in one pass: the gradients of a BatchNorm."""
    if x.numel() == 0:
        return torch.zeros_like(mean), torch.zeros_like(mean)
    weight = torch.ones_like(mean)  # GPUs want one, for nothing
    _, dy_xhat, dy_sum = torch.ops.aten.native_batch_norm_backward(
        dy, x, weight, None, None, mean, inverse_std, True, 0.0, [False, True, True]
    )
    return dy_xhat, dy_sum
