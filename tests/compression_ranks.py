"""Run by test_compression.py on each rank: `compression_ranks.py cases.pt out.pt`.

Every case is a reduction and a training with it; what each rank saw and holds in the end is
gathered and saved by rank 0.
"""

from __future__ import annotations

import copy
import gc
import io
import sys
from contextlib import nullcontext
from typing import Any

from mpi4py import MPI

# isort: split
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from apps.strategies.compression import Cast, Hierarchical, Mean, PowerSgd, Reduction, TopK
from apps.strategies.group import start_torch

KINDS = {
    "mean": Mean,
    "cast": Cast,
    "hierarchical": Hierarchical,
    "powersgd": PowerSgd,
    "topk": TopK,
}
EVENTS, CLASSES = 32, 5  # events of a step, of all ranks


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv1d(2, 8, 5), nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, CLASSES)
    )


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Events (EVENTS, 2, 12), and the class that a fixed linear rule gives them."""
    x = torch.randn(EVENTS, 2, 12, generator=torch.Generator().manual_seed(step))
    rule = torch.randn(24, CLASSES, generator=torch.Generator().manual_seed(1234))
    return x, (x.flatten(1) @ rule).argmax(dim=1)


def loss_of(model: nn.Module, events: tuple[torch.Tensor, torch.Tensor], scale: float = 1.0):
    x, y = events
    return scale * cross_entropy(model(x.to(next(model.parameters()).dtype)).float(), y)


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: each.grad.clone() for name, each in model.named_parameters()}


class Run:
    """One case on one rank."""

    def __init__(self, case: dict[str, Any], comm: MPI.Intracomm, groups: dict[str, Any]) -> None:
        self.case, self.comm = case, comm
        self.model = network().to(case.get("dtype", torch.float32))
        self.wrapped = DistributedDataParallel(self.model, bucket_cap_mb=0.002)
        more = {name: groups[name] for name in ("inner", "outer")}
        more = more if case["kind"] == "hierarchical" else {}
        self.reduction: Reduction = KINDS[case["kind"]](
            groups["own"], self.model, **more, **case.get("args", {})
        )
        self.num_buckets = 0
        self.records = case.get("record", True)
        hook = self.count if self.records else self.reduction.__call__
        self.wrapped.register_comm_hook(None, hook)
        self.optimizer = torch.optim.SGD(self.model.parameters(), case.get("lr", 0.1))

    def count(self, state, bucket):
        self.num_buckets += 1
        return self.reduction(state, bucket)

    def parts(self, step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What this rank trains on in a step, in pieces."""
        x, y = (values[self.comm.rank :: self.comm.size] for values in batch(step))
        count = self.case.get("accumulate", 1)
        return list(zip(x.chunk(count), y.chunk(count), strict=True))

    def step(self, step: int) -> None:
        parts = self.parts(step)
        self.optimizer.zero_grad()
        for number, part in enumerate(parts):
            is_last = number == len(parts) - 1
            with nullcontext() if is_last else self.wrapped.no_sync():
                scale = self.case.get("scale", 1.0) / len(parts)
                loss_of(self.wrapped, part, scale).backward()
        self.optimizer.step()

    def own_gradients(self, step: int) -> dict[str, torch.Tensor]:
        """Of this rank's part, without any other rank."""
        alone = copy.deepcopy(self.model)
        alone.zero_grad()
        parts = self.parts(step)
        for part in parts:
            loss_of(alone, part, self.case.get("scale", 1.0) / len(parts)).backward()
        return gradients_of(alone)

    def forget(self) -> None:
        """Lose what was left out."""
        state = self.reduction.state()
        for name in ("errors", "residuals"):
            for kept in state.get(name, {}).values():
                kept.zero_()

    def save(self) -> bytes:
        file = io.BytesIO()
        torch.save({"weights": self.model.state_dict(), "state": self.reduction.state()}, file)
        return file.getvalue()

    def load(self, content: bytes) -> None:
        saved = torch.load(io.BytesIO(content), weights_only=True)
        self.model.load_state_dict(saved["weights"])
        self.reduction.load_state(saved["state"])

    def whole(self) -> dict[str, Any]:
        case, found = self.case, {"own": [], "mean": [], "sent_bytes": [], "saved": None}
        if "saved" in case:
            self.load(case["saved"][self.comm.rank])
        for step in range(*case["steps"]):
            if step == case.get("save_before"):
                found["saved"] = self.save()
            if self.records:
                found["own"].append(self.own_gradients(step))
            self.num_buckets = 0
            self.step(step)
            if self.records:
                found["mean"].append(gradients_of(self.model))
            found["sent_bytes"].append(self.reduction.sent_bytes)
            if case.get("forgets"):
                self.forget()
        found["weights"] = {name: each.clone() for name, each in self.model.state_dict().items()}
        found["state"] = copy.deepcopy(self.reduction.state())
        found["num_buckets"] = self.num_buckets
        found["outer_bytes"] = getattr(self.reduction, "outer_bytes", None)
        return found


def groups_of(comm: MPI.Intracomm) -> dict[str, dist.ProcessGroup | None]:
    """Workers of two ranks."""
    workers = [dist.new_group([first, first + 1]) for first in range(0, comm.size, 2)]
    firsts = dist.new_group(list(range(0, comm.size, 2)))
    return {
        "own": dist.new_group(list(range(comm.size))),
        "inner": workers[comm.rank // 2],
        "outer": firsts if comm.rank % 2 == 0 else None,
    }


def run_all(cases: list[dict[str, Any]], comm: MPI.Intracomm) -> list[Any]:
    groups = groups_of(comm)
    return [comm.gather(Run(case, comm, groups).whole()) for case in cases]


if __name__ == "__main__":
    world = MPI.COMM_WORLD
    start_torch(world, torch.device("cpu"))
    every = run_all(torch.load(sys.argv[1]), world)
    if world.rank == 0:
        torch.save(every, sys.argv[2])
    world.Barrier()
    gc.collect()  # what holds a process group must be gone before it is
    dist.destroy_process_group()
