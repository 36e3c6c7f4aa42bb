"""From a study to its tasks: folds, seeds, layouts, names."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from apps.contract import (
    CENTRAL,
    Data,
    Fingerprint,
    Layout,
    Model,
    N3LOError,
    Start,
    Training,
    TrainTask,
    ranks_of,
    with_sources,
)
from sites.launchers import Shape
from workflow.fingerprint import beside, read_files
from workflow.ledger import Ledger
from workflow.search.base import Observation, Proposal
from workflow.space import Choice, Ordinal
from workflow.study import Study, StudyFile, is_remote

# What a seed is for, so that no two uses share random numbers.
_SPLIT, _TASK, _SEARCH = 0, 1, 2
FIRST_POINT_DRAWS = 100

# Choices that decide how many ranks a layout has.
DECIDE_RANKS = ("training.strategy", "training.exchange.transport")


@dataclass(frozen=True)
class Planner:
    """Expands trials into tasks. All that the tasks of one study have in common."""

    file: StudyFile
    data_files: list[Path]
    fingerprint: Fingerprint

    def tasks(
        self,
        proposal: Proposal,
        root: int | None = None,
        starts: Mapping[int, Start] | None = None,
        keep_state: bool = False,
    ) -> list[TrainTask]:
        """The tasks of a trial, one a fold.

        Args:
            root: the trial from which it descends. It lends its seeds, so that a training that goes
                on is the same as one that never stopped.
            starts: what each fold goes on from; without, they begin anew.
            keep_state: whether other trials may go on from this one.
        """
        trial = proposal.number or 0
        study = self.file.at({**proposal.settings, **proposal.point})
        return [
            dataclasses.replace(
                self._task(study, trial, fold, trial if root is None else root),
                start=(starts or {}).get(fold),
                keep_state=keep_state,
            )
            for fold in range(study.data.folds)
        ]

    def known_tasks(self, ledger: Ledger, trial: int) -> list[TrainTask]:
        """The tasks of a trial that is in the ledger."""
        state = ledger.trials_by_number[trial]
        return self.tasks(
            state.proposal, ledger.root(trial), ledger.starts(trial), state.keep_state
        )

    def base_task(self) -> TrainTask:
        """A task of the study as it stands in the file, for a look at it before anything runs."""
        return self._task(self.file.study, 0, 0, 0)

    def with_first_point(
        self, proposal: Proposal, others: Sequence[Observation | Proposal], rng: np.random.Generator
    ) -> Proposal:
        """The proposal with the next of the user's first points, while one was not tried.

        Only new points are replaced, no promotions. Values that the user left out are the
        proposal's own, or random where those do not go together.
        """
        if not proposal.is_new:
            return proposal
        known = [each.point for each in others]
        space = self.file.space
        taken = {space.identity(point) for point in known if space.contains(point)}
        for first in self.file.study.search.first_points:
            if any(first.items() <= point.items() for point in known):
                continue
            values = {**proposal.point, **first}
            for _ in range(FIRST_POINT_DRAWS):
                point = space.fill(values, rng)
                if space.contains(point) and space.identity(point) not in taken:
                    return dataclasses.replace(proposal, point=space.clip(point))
                values = {**space.sample(rng), **first}
        return proposal

    def _task(self, study: Study, trial: int, fold: int, root: int) -> TrainTask:
        return TrainTask(
            study=study.name,
            trial=trial,
            fold=fold,
            seed=_seed(study.seed, _TASK, root, fold),
            split_seed=_seed(study.seed, _SPLIT),
            model=self._model(study.model),
            data=self._data(study.data),
            training=self._training(study.training),
            layout=study.layout,
            objective=study.search.objective,
            fingerprint=self.fingerprint,
        )

    def _model(self, model: Model) -> Model:
        return dataclasses.replace(
            model, source=absolute(self.file, model.source), files=self._read_files
        )

    @cached_property
    def _file_numbers(self) -> list[float] | None:
        """Found once, as the files are: one that appears meanwhile belongs to no task."""
        return self.file.file_numbers()

    @cached_property
    def _read_files(self) -> list[str]:
        return [str(path) for path in read_files(self.file)]

    def _data(self, data: Data) -> Data:
        files = [str(path) for path in self.data_files]
        # What was fetched is a file like others; "aws s3 cp" would not copy it to a node.
        fetched = any(is_remote(name) for name in data.files)
        command = None if fetched else data.copy_command
        return dataclasses.replace(
            data,
            files=files,
            file_numbers=self._file_numbers,
            copy_command=command,
            reader=data.reader and absolute(self.file, data.reader),
            collate=data.collate and absolute(self.file, data.collate),
        )

    def _training(self, training: Training) -> Training:
        make_absolute = partial(absolute, self.file)
        return dataclasses.replace(
            training,
            loss=with_sources(training.loss, make_absolute),
            metrics=with_sources(training.metrics, make_absolute),
        )


def absolute(file: StudyFile, source: str) -> str:
    """The ranks run in another folder: what lies beside the study with its full path."""
    place, _, name = source.partition(":")
    if place.endswith(".py"):
        return f"{(file.path.parent / Path(place).expanduser()).resolve()}:{name}"
    found = beside(file.path.parent, place)
    return source if found is None else f"{found}:{name}"


def fitted(
    file: StudyFile, history: Sequence[Observation], pending: Sequence[Proposal]
) -> tuple[list[Observation], list[Proposal]]:
    """The trials with their points as today's space has them (see `Space.completed`)."""
    space, own = file.space, file.own_values()

    def fit(proposal: Proposal) -> Proposal:
        point = space.completed(proposal.point, own)
        return proposal if point is None else dataclasses.replace(proposal, point=point)

    return (
        [dataclasses.replace(seen, proposal=fit(seen.proposal)) for seen in history],
        [fit(proposal) for proposal in pending],
    )


def _seed(study_seed: int, *purpose: int) -> int:
    return int(np.random.SeedSequence(study_seed, spawn_key=purpose).generate_state(1)[0])


def search_rng(study_seed: int, trial: int) -> np.random.Generator:
    """The random numbers of one proposal: they depend on nothing that happened before."""
    return np.random.default_rng(np.random.SeedSequence(study_seed, spawn_key=(_SEARCH, trial)))


def shape_of(training: Training, layout: Layout) -> Shape:
    ranks = ranks_of(training, layout)
    return Shape(
        num_ranks=ranks.total,
        cores_per_rank=layout.cores_per_rank,
        gpus_per_rank=layout.gpus_per_rank,
        num_masters=ranks.masters,
        outlives_ranks=training.strategy in CENTRAL and training.exchange.tolerate_worker_loss,
    )


def largest_shape(file: StudyFile) -> Shape:
    """What a site must have room for: every searched layout value at its largest."""
    shapes = _shapes(file, max)
    num_ranks = max(shape.num_ranks for shape in shapes)
    most_workers = max(shape.num_ranks - shape.num_masters for shape in shapes)
    return dataclasses.replace(shapes[0], num_ranks=num_ranks, num_masters=num_ranks - most_workers)


def smallest_shape(file: StudyFile) -> Shape:
    """What a site has room for most often: every searched layout value at its smallest."""
    try:
        shapes = _shapes(file, min)
    except N3LOError:  # they need not go together
        return largest_shape(file)
    num_ranks = min(shape.num_ranks for shape in shapes)
    fewest_workers = min(shape.num_ranks - shape.num_masters for shape in shapes)
    masters = num_ranks - fewest_workers
    return dataclasses.replace(shapes[0], num_ranks=num_ranks, num_masters=masters)


def _shapes(file: StudyFile, end: Callable[[Sequence[int]], int]) -> list[Shape]:
    """Of each strategy, with the searched layout values at one end."""
    space, layout = file.study.search.space, dict(_layout_at(file, end))
    dimensions = {path: space[path] for path in DECIDE_RANKS if path in space}
    choices = {path: each.values for path, each in dimensions.items() if isinstance(each, Choice)}
    shapes = []
    for values in itertools.product(*choices.values()):
        try:
            study = file.at({**layout, **dict(zip(choices, values, strict=True))})
        except N3LOError as error:  # perhaps a condition or a constraint keeps it out
            refused = error
        else:
            shapes.append(shape_of(study.training, study.layout))
    if not shapes:
        raise refused
    return shapes


def _layout_at(file: StudyFile, end: Callable[[Sequence[int]], int]) -> Iterator[tuple[str, int]]:
    for path, dimension in file.study.search.space.items():
        if path.startswith("layout.") and path != "layout.walltime_min":
            if isinstance(dimension, Choice | Ordinal):
                yield path, end([int(value) for value in dimension.values])
            else:
                yield path, end([int(dimension.low), int(dimension.high)])
