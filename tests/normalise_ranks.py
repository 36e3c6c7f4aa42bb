"""Run by test_normalise.py on each rank: `normalise_ranks.py cases.pt out.pt`.

Every case is a layer's settings and the batches of each rank for some steps; what each rank has
after each step is gathered and saved by rank 0, for torch.distributed and for Horovod.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from apps.normalise import synchronise

Sum = Callable[[torch.Tensor], torch.Tensor]


def layer_of(case: dict) -> nn.Module:
    layer = getattr(nn, case["layer"])(3, **case["settings"])
    if layer.affine:
        with torch.no_grad():
            layer.weight.copy_(torch.tensor([0.5, 1.0, 2.0]))
            layer.bias.copy_(torch.tensor([0.1, 0.0, -0.3]))
    return layer


def step(layer: nn.Module, parts: list[torch.Tensor], case: dict) -> dict:
    """One forward and backward pass; several parts go through the layer one after the other."""
    layer.zero_grad()
    inputs = [part.clone().requires_grad_() for part in parts]
    loss = torch.zeros(())
    outputs = []
    for each in inputs:
        with torch.autocast("cpu", torch.bfloat16, enabled=case["half"]):
            once = each.bfloat16() if case["half"] else each
            again = case["checkpoint"]
            output = checkpoint(layer, once, use_reentrant=False) if again else layer(once)
        # No layer's gradient is zero by symmetry, as that of the sum of squares would be.
        loss = loss + (output.float().sin() * output.float().square()).sum()
        outputs.append(output.detach())
    loss.backward()
    return {
        "outputs": outputs,
        "inputs": [each.grad for each in inputs],
        "parameters": {name: each.grad for name, each in layer.named_parameters()},
        "buffers": {name: each.clone() for name, each in layer.named_buffers()},
    }


def run(case: dict, rank: int, sum_over_ranks: Sum) -> dict:
    layer = layer_of(case)
    if case["synchronise"]:
        layer = synchronise(layer, sum_over_ranks)
    steps = [step(layer, parts[rank], case) for parts in case["steps"]]
    return {"steps": steps, "eval": layer.eval()(case["steps"][-1][rank][0]).detach()}


def sum_by_torch(vector: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(vector)
    return vector


if __name__ == "__main__":  # test_normalise.py, which imports this, must not start MPI
    import horovod.torch as hvd
    from mpi4py import MPI

    from apps.strategies.group import start_torch

    world = MPI.COMM_WORLD
    cases = torch.load(sys.argv[1])
    start_torch(world, torch.device("cpu"))
    found = {"torch": [world.gather(run(case, world.rank, sum_by_torch)) for case in cases]}
    world.Barrier()
    dist.destroy_process_group()

    hvd.init(comm=world)

    def sum_by_horovod(vector: torch.Tensor) -> torch.Tensor:
        return hvd.allreduce(vector, name=f"batch_norm.{len(vector)}", op=hvd.Sum)

    found["horovod"] = [world.gather(run(case, world.rank, sum_by_horovod)) for case in cases]
    world.Barrier()
    hvd.shutdown()
    if world.rank == 0:
        torch.save(found, sys.argv[2])
