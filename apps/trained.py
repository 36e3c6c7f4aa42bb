"""What a finished task has left, to be used: its networks with the weights of the best epoch."""

from __future__ import annotations

from pathlib import Path

import torch

from apps.check import first_events
from apps.contract import N3LOError, TaskPaths, TrainTask
from apps.experiment import Experiment, make_experiment
from apps.hdf5 import Index, index_files
from apps.transforms import kept, with_kept


def load_trained(folder: Path, device: torch.device) -> tuple[TrainTask, Experiment]:
    """The task and its networks, on a device and as validation has them.

    Raises:
        N3LOError: the task is not finished, or its model is not what it was.
    """
    paths = TaskPaths(folder)
    if not paths.result.exists():
        raise N3LOError(f"task {folder.name} is not finished: there is no {paths.result}")
    task = TrainTask.read(paths.task)
    experiment = make_experiment(
        task.model,
        task.scaled_training,
        lambda: first_events(trained_index(folder, task)),
        task.data.collate,
    )
    try:
        weights = torch.load(paths.weights, map_location=device, weights_only=True)
        for name, state in experiment.states_of(weights).items():
            experiment.networks[name].load_state_dict(state)
    except (RuntimeError, KeyError) as error:
        lines = str(error).splitlines()
        raise N3LOError(
            f"{paths.weights}: the model '{task.model.source}' is not what it was when it was "
            f"trained: {(lines[1:] or lines)[0].strip()}"
        ) from error
    except OSError as error:
        raise N3LOError(f"{paths.weights}: {error.strerror}") from error
    experiment.device = device
    for network in experiment.networks.values():
        network.to(device)
    experiment.train(False)
    return task, experiment


def trained_index(folder: Path, task: TrainTask) -> Index:
    """The files of a task, with the numbers that its transforms took from its training events.

    Raises:
        N3LOError: the files or the numbers cannot be read.
    """
    numbers = kept(TaskPaths(folder).transforms, task.data.transforms)
    return with_kept(index_files(task.data), numbers)


def this_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
