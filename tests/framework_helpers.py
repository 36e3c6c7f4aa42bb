"""Trainings in this process: a framework takes seconds to import, and only once here."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch
from training_helpers import classes_h5, make_task, write_task

from apps import checkpoint
from apps.contract import TaskPaths, TrainTask, read_json_lines
from apps.train import train


class Workplace:
    """A folder with a model file, data of three classes, and trainings."""

    def __init__(self, folder: Path, models: str) -> None:
        self.folder = folder
        self.models = folder / "models.py"
        self.models.write_text(models)
        self.data = classes_h5(folder / "events.h5")

    def task(self, name: str, args: dict[str, Any] | None = None, **training: Any) -> TrainTask:
        layout = training.pop("layout", {})
        model = {"source": f"{self.models}:{name}", "args": args or {}}
        return make_task([self.data], model=model, training=training, layout=layout)

    def train(self, label: str, task: TrainTask, kill_after: int | None = None) -> Path:
        """The folder of a task that was trained, or killed after so many epochs and started again.

        Returns:
            The folder, with `weights.pt`.
        """
        folder = write_task(self.folder / label, task).parent
        paths = TaskPaths(folder)
        if kill_after is not None:
            save = checkpoint.save

            def save_and_die(path: Path, content: dict[str, Any]) -> None:
                save(path, content)
                if path == paths.checkpoint and len(content["rows"]) == kill_after:
                    raise KeyboardInterrupt

            try:
                with mock.patch.object(checkpoint, "save", save_and_die):
                    train(task, paths)
            except KeyboardInterrupt:
                assert not paths.result.exists()
        train(task, paths)
        return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "weights.pt", weights_only=True)


def last_row(folder: Path) -> dict[str, float]:
    return read_json_lines(folder / "history.jsonl")[-1]


def assert_same_bits(one: Path, other: Path) -> None:
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
