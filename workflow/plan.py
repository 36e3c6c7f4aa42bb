"""From a study to its tasks: folds, seeds, layouts, names."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from apps.contract import Fingerprint, Layout, TrainTask
from sites.launchers import Shape
from workflow.space import Choice, Point
from workflow.study import Study, StudyFile

# What a seed is for, so that no two uses share random numbers.
_SPLIT, _TASK, _SEARCH = 0, 1, 2


@dataclass(frozen=True)
class Planner:
    """Expands trials into tasks. All that the tasks of one study have in common."""

    file: StudyFile
    data_files: list[Path]
    fingerprint: Fingerprint

    def tasks(self, trial: int, point: Point) -> list[TrainTask]:
        """The tasks of a trial, one a fold."""
        study = self.file.at(point)
        return [self._task(study, trial, fold) for fold in range(study.data.folds)]

    def base_task(self) -> TrainTask:
        """A task of the study as it stands in the file, for a look at it before anything runs."""
        return self._task(self.file.study, 0, 0)

    def _task(self, study: Study, trial: int, fold: int) -> TrainTask:
        return TrainTask(
            study=study.name,
            trial=trial,
            fold=fold,
            seed=_seed(study.seed, _TASK, trial, fold),
            split_seed=_seed(study.seed, _SPLIT),
            model=dataclasses.replace(study.model, source=self._absolute(study.model.source)),
            data=dataclasses.replace(study.data, files=[str(path) for path in self.data_files]),
            training=study.training,
            layout=study.layout,
            objective=study.search.objective,
            fingerprint=self.fingerprint,
        )

    def _absolute(self, source: str) -> str:
        """The ranks run in another folder: "my_model.py:Tagger" with its full path."""
        path, _, name = source.partition(":")
        if not path.endswith(".py"):
            return source
        return f"{(self.file.path.parent / Path(path).expanduser()).resolve()}:{name}"


def _seed(study_seed: int, *purpose: int) -> int:
    return int(np.random.SeedSequence(study_seed, spawn_key=purpose).generate_state(1)[0])


def search_rng(study_seed: int, trial: int) -> np.random.Generator:
    """The random numbers of one proposal: they depend on nothing that happened before."""
    return np.random.default_rng(np.random.SeedSequence(study_seed, spawn_key=(_SEARCH, trial)))


def shape_of(layout: Layout) -> Shape:
    return Shape(
        num_ranks=layout.num_ranks,
        cores_per_rank=layout.cores_per_rank,
        gpus_per_rank=layout.gpus_per_rank,
    )


def largest_shape(file: StudyFile) -> Shape:
    """What a slot must hold: the layout with every searched layout value at its largest."""
    return shape_of(file.at(dict(_largest_layout(file))).layout)


def _largest_layout(file: StudyFile) -> Iterator[tuple[str, int]]:
    for path, dimension in file.study.search.space.items():
        if path.startswith("layout.") and path != "layout.walltime_min":
            ends = dimension.values if isinstance(dimension, Choice) else [dimension.high]
            yield path, max(int(end) for end in ends)
