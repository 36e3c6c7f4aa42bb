"""The ranks of a worker hold consecutive layers, and pass parts of each batch on."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import filter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from apps.clock import Clock, Mark
from apps.contract import N3LOError
from apps.data import Batch, rows_of
from apps.experiment import float32
from apps.strategies import stages
from apps.strategies.base import kept_buffers
from apps.strategies.group import start_torch
from apps.strategies.tensor import InParts
from apps.strategies.tensor_plan import found_plan, nothing_to_split, split

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class Pipeline(InParts):
    """A batch passes the stages in `micro_batches` parts, so that all have something to do.

    With the schedule "gpipe" all parts go forward before the first goes back (Huang et al. 2019,
    arXiv:1811.06965); with "1f1b" a stage goes back as soon as it can, and keeps the activations of
    fewer parts (Narayanan et al. 2019, arXiv:1806.03377). Both do the arithmetic of the whole
    batch, but for BatchNorm, which sees one part at a time. Of the time a stage is idle for about
    (stages - 1) / (micro_batches + stages - 1).

    Several ranks of a stage divide its layers as `tensor` does, and several workers train on parts
    of each batch: data x pipeline x tensor parallelism.
    """

    def connect(self) -> None:
        topology, ranks, settings = self.topology, self.topology.ranks, self.training.split
        if list(self.networks) != ["model"]:
            raise N3LOError("training.strategy: 'pipeline' trains one network, not several")
        start_torch(topology.comm, topology.device)
        self.same_start()
        self.note_names()
        num_stages = ranks.per_worker // ranks.per_stage
        self._mesh = init_device_mesh(
            topology.device.type,
            (ranks.workers, num_stages, ranks.per_stage),
            mesh_dim_names=("workers", "stages", "ranks"),
        )
        _, self._number, self._part = self._mesh.get_coordinate()

        # NCCL needs to know a group before the first of its ranks sends to another.
        group = self._mesh["stages"].get_group()
        dist.all_reduce(torch.zeros(1, device=topology.device), group=group)

        # All parts of a batch are of one size: smaller batches are filled up.
        self._num_micro = settings.micro_batches
        self._size = -(-self.preview.largest_batch // self._num_micro)
        inputs = self.preview.example(self._size).inputs
        with self.experiment.autocast(torch.device("cpu")):  # what passes on is in that precision
            self._traced = stages.trace(self.networks["model"], inputs)
            self._cuts = topology.from_first(lambda: self._choose_cuts(num_stages, inputs))
            parts = stages.stages(self._traced, self._cuts)
            shapes = stages.examples(self._traced, parts, inputs)
        stage = parts[self._number]
        plan = topology.from_first(lambda: self._plans(parts, inputs))[self._number]
        self.networks = self.experiment.networks = {"model": stage}
        self.place_networks()
        if plan:
            split(stage, self._mesh["ranks"], plan)
        timed = TimedStage(
            stage,
            self._number,
            num_stages,
            topology.device,
            input_args=shapes[self._number],
            output_args=shapes[self._number + 1],
            group=group,
        )
        timed.clock = self.clock
        self._stage = timed
        self._schedule = SCHEDULES[settings.schedule](
            timed, self._num_micro, loss_fn=self._loss, scale_grads=False
        )
        self.make_optimizers()

    def choices(self) -> dict[str, Any]:
        return {"cuts": self._cuts, "num_nodes": len(self._traced.nodes)}

    def _choose_cuts(self, num_stages: int, inputs: Any) -> list[int]:
        names = self.training.split.stages
        if names:
            return stages.cut_at(self._traced, names, num_stages)
        before = self.preview.chosen
        same_model = before.get("num_nodes") == len(self._traced.nodes)
        if same_model and len(before["cuts"]) == num_stages - 1:
            return before["cuts"]
        return stages.cut(self._traced, stages.costs(self._traced, inputs), num_stages)

    def _plans(self, parts: list[nn.Module], inputs: Any) -> list[dict[str, str]]:
        """How the ranks of each stage divide it."""
        num_ranks, given = self.topology.ranks.per_stage, self.training.split.tensor
        if num_ranks == 1:
            return [{} for _ in parts]
        values: Any = stages.positional(self._traced, inputs)
        plans = []
        for part in parts:
            modules = part.named_modules()
            names = [name for name, each in modules if isinstance(each, nn.Linear | nn.Embedding)]
            own = {pattern: style for pattern, style in given.items() if filter(names, pattern)}
            has_some = not given or own
            plans.append(found_plan(part.eval(), list(values), num_ranks, own) if has_some else {})
            with torch.no_grad():
                values = part(*values)
            values = (values,) if isinstance(values, torch.Tensor) else values
        if not any(plans):
            raise nothing_to_split(num_ranks, "layout.ranks_per_stage")
        return plans

    # -- a batch -----------------------------------------------------------------------------------

    def step(self, batch: Batch) -> torch.Tensor:
        self.optimizers["model"].zero_grad()
        sums = self._run(self._schedule.step, batch)
        self.apply("model")
        return sums

    def evaluate(self, batch: Batch) -> torch.Tensor:
        most = self._size * self._num_micro
        pieces = batch.cut(-(-batch.num_events // most))
        return torch.stack([self._run(self._schedule.eval, piece) for piece in pieces]).sum(dim=0)

    def _run(self, schedule: Callable[..., Any], batch: Batch) -> torch.Tensor:
        """Send a batch through the stages; sums of the metrics on the last one."""
        self._batch, self._sums = batch, self.experiment.no_sums()
        rows = torch.arange(self._size * self._num_micro)
        inputs = stages.positional(self._traced, batch.inputs) if self._stage.is_first else ()
        arguments = [each[(rows % batch.num_events).to(each.device)] for each in inputs]
        target = {"target": rows} if self._stage.is_last else {}
        start = self.clock.mark()
        self._stage.waits_since = start
        with self.experiment.autocast(self.topology.device):
            schedule(*arguments, **target, return_outputs=False)
        self.clock.note("communication", self._stage.waits_since)
        return self._sums

    def _loss(self, outputs: Any, rows: torch.Tensor) -> torch.Tensor:
        """This part's share of the batch's mean loss.

        Args:
            rows: of the batch; those after its last event repeat others.
        """
        batch, first = self._batch, int(rows[0])
        number = max(0, min(batch.num_events - first, len(rows)))
        with torch.autocast(self.topology.device.type, enabled=False):
            outputs = float32(stages.restore(self._traced, outputs))
            if number == 0:
                return stages.some_tensor(outputs).sum() * 0.0
            part = batch.part(first, first + number)
            outputs = rows_of(outputs, 0, number)
            loss = self.experiment.loss(outputs, part)
            self._sums += self.experiment.sums(loss, outputs, part)
        return loss * (number * self.num_averaged / batch.num_global)

    # -- what the stages share ---------------------------------------------------------------------

    @property
    def seed_key(self) -> int:
        """Stages drop other things; the ranks of a stage must drop the same."""
        return self.topology.rank // self.topology.ranks.per_stage

    def squared_norm(self, network: str) -> torch.Tensor:
        square = super().squared_norm(network)
        dist.all_reduce(square, group=self._mesh["stages"].get_group())
        return square

    def average_buffers(self) -> None:
        group = self.workers_group
        for buffer in kept_buffers(self.networks["model"]):
            if buffer.is_floating_point():
                dist.all_reduce(buffer, group=group)
                buffer /= group.size()

    @property
    def speaks(self) -> bool:
        return self.topology.place.worker == 0 and self._part == 0

    def merged(self, own: dict[str, Any]) -> dict[str, Any]:
        gathered = self.topology.gather(own if self.speaks else {})
        return {name: value for part in gathered.values() for name, value in part.items()}

    def close(self) -> None:
        self._schedule = self._stage = None
        super().close()


class TimedStage(PipelineStage):
    """Notes what passes between its forward and backward passes as waiting for other stages."""

    clock: Clock
    waits_since: Mark

    def forward_one_chunk(self, *arguments: Any, **options: Any) -> Any:
        self.clock.note("communication", self.waits_since)
        outputs = super().forward_one_chunk(*arguments, **options)
        self.waits_since = self.clock.mark()
        return outputs

    def backward_one_chunk(self, *arguments: Any, **options: Any) -> Any:
        self.clock.note("communication", self.waits_since)
        gradients = super().backward_one_chunk(*arguments, **options)
        self.waits_since = self.clock.mark()
        return gradients
