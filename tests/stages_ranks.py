"""Run by test_stages.py on each rank: `stages_ranks.py cases.pt out.pt`.

Every case is a model, the modules that begin a stage, a schedule and a batch. Each rank holds one
stage; what it has after a step and an evaluation is gathered and saved by rank 0.
"""

from __future__ import annotations

import gc
import sys
from typing import Any

from mpi4py import MPI

# isort: split
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.functional import cross_entropy

from apps.models.jets import DeepSets
from apps.strategies.group import start_torch
from apps.strategies.stages import cut_at, examples, positional, restore, stages, trace

CPU = torch.device("cpu")
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
NUM_MICRO = 4


class Residual(nn.Module):
    """A skip connection over two layers: (B, 3) -> (B, 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 8)
        self.second = nn.Linear(8, 8)
        self.third = nn.Linear(8, 8)
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        start = self.first(x)
        return self.last(start + self.third(self.second(start).tanh()).tanh())


class Masked(nn.Module):
    """A mask, integers and a number of the first stage are used by the last: (B, N, 4) -> (B, 3).

    The gradient of `unused` is zero, and that of the mask does not exist.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.middle = nn.Linear(8, 8)
        self.kinds = nn.Embedding(4, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = x[..., 0] > 0  # (B, N), bool
        kind = x.argmax(dim=2)  # (B, N), int64
        narrow = kind.int()
        num = x.shape[1]
        hidden = self.embed(x)
        unused = hidden * 2
        hidden = self.middle(hidden.relu()) + self.kinds(kind)
        summed = (hidden * mask.unsqueeze(2)).sum(dim=1) / num + narrow.sum(dim=1, keepdim=True)
        return self.head(summed) + 0 * unused.detach().sum()


class Normed(nn.Module):
    """BatchNorm in every stage: (B, 3) -> (B, 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6))
        self.second = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
        self.third = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(self.first(x)))


class Table(nn.Module):
    """Inputs and outputs that are tables, and an argument that is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.tracks = nn.Linear(3, 6)
        self.towers = nn.Linear(2, 6)
        self.label = nn.Linear(6, 3)
        self.energy = nn.Linear(6, 1)

    def forward(
        self, tracks: torch.Tensor, towers: torch.Tensor, weight: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        hidden = self.tracks(tracks).tanh()
        if weight is not None:
            hidden = hidden * weight
        hidden = hidden + self.towers(towers).tanh()
        return {"label": self.label(hidden), "energy": self.energy(hidden)}


MODELS = {
    "residual": Residual,
    "masked": Masked,
    "normed": Normed,
    "table": Table,
    "deep_sets": lambda: DeepSets(width=8, depth=3),
}


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def loss(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    if isinstance(outputs, dict):
        return cross_entropy(outputs["label"], targets) + outputs["energy"].square().mean()
    return cross_entropy(outputs, targets)


def run(case: dict[str, Any], comm: MPI.Intracomm) -> dict[str, Any]:
    """One step from the parameters of `make`, and an evaluation after it."""
    model = make(case["model"])
    micro = _part(case["inputs"])
    traced = trace(model, micro)
    parts = stages(traced, cut_at(traced, case["at"], comm.size))
    passed = examples(traced, parts, micro)
    part, is_last = parts[comm.rank], comm.rank == comm.size - 1

    def make_stage() -> PipelineStage:
        taken, given = passed[comm.rank : comm.rank + 2]
        return PipelineStage(part, comm.rank, comm.size, CPU, input_args=taken, output_args=given)

    def loss_fn(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        return loss(restore(traced, outputs), targets)

    inputs = positional(traced, case["inputs"]) if comm.rank == 0 else ()
    training = SCHEDULES[case["schedule"]](make_stage(), NUM_MICRO, loss_fn)
    losses: list[torch.Tensor] = []
    target = {"target": case["targets"], "losses": losses} if is_last else {}
    training.step(*inputs, return_outputs=False, **target)
    result = {
        "gradients": {name: each.grad.clone() for name, each in part.named_parameters()},
        "state": {name: each.clone() for name, each in part.state_dict().items()},
        "losses": [each.detach() for each in losses],
    }
    part.eval()
    with torch.no_grad():
        outputs = training.eval(*inputs, **({"target": case["targets"]} if is_last else {}))
        forward = ScheduleGPipe(make_stage(), NUM_MICRO, scale_grads=False)
        again = forward.step(*inputs)
    if is_last:
        result["outputs"] = [restore(traced, outputs), restore(traced, again)]
    return result


def _part(inputs: Any) -> Any:
    """The first micro-batch."""
    if isinstance(inputs, dict):
        return {name: each.chunk(NUM_MICRO)[0] for name, each in inputs.items()}
    return inputs.chunk(NUM_MICRO)[0]


if __name__ == "__main__":
    world = MPI.COMM_WORLD
    start_torch(world, CPU)
    every = [world.gather(run(case, world)) for case in torch.load(sys.argv[1])]
    if world.rank == 0:
        torch.save(every, sys.argv[2])
    world.Barrier()
    gc.collect()
    dist.destroy_process_group()
