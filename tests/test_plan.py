"""From trials to tasks."""

from __future__ import annotations

import numpy as np
import pytest

from apps.contract import Fingerprint, Start
from sites.launchers import Shape
from workflow.plan import Planner, largest_shape, search_rng
from workflow.search import Proposal
from workflow.study import load

POINT = {"training.optimizer.lr": 0.1, "model.args.width": 4}


def proposal(trial: int, **more) -> Proposal:
    return Proposal(POINT, number=trial, **more)


@pytest.fixture
def planner(study_path) -> Planner:
    file = load(study_path)
    return Planner(file, file.data_files(), Fingerprint(data="d", model="m", code="c"))


def test_a_trial_has_a_task_for_each_fold(planner):
    tasks = planner.tasks(proposal(3))
    assert [task.id for task in tasks] == ["t003-f0", "t003-f1"]
    assert len({task.key() for task in tasks}) == 2


def test_all_trials_share_the_fold_split_and_none_share_seeds(planner):
    tasks = [task for trial in range(20) for task in planner.tasks(proposal(trial))]
    assert len({task.split_seed for task in tasks}) == 1
    assert len({task.seed for task in tasks}) == len(tasks)


def test_a_plan_is_the_same_each_time(planner):
    assert planner.tasks(proposal(3)) == planner.tasks(proposal(3))


def test_the_ranks_find_model_and_data_from_any_folder(planner, study_path):
    [task, _] = planner.tasks(proposal(0))
    assert task.model.source == f"{study_path.parent}/my_model.py:Tagger"
    assert task.data.files == [str(study_path.parent / "events.h5")]


def test_the_random_numbers_of_a_proposal_depend_on_study_and_trial_alone():
    assert search_rng(1, 5).random() == search_rng(1, 5).random()
    assert len({search_rng(s, t).random() for s in range(4) for t in range(4)}) == 16


def test_a_slot_holds_the_largest_layout_of_the_space(edit):
    edit('strategy = "local"', 'strategy = "allreduce"')
    edit('"model.args.width" = { type = "int", low = 2, high = 8 }',
         '"layout.num_workers" = { type = "int", low = 1, high = 3 }\n'
         '"layout.cores_per_rank" = { type = "choice", values = [4, 2] }')  # fmt: skip
    path = edit("walltime_min = 2", "walltime_min = 2\nranks_per_worker = 2")
    assert largest_shape(load(path)) == Shape(num_ranks=6, cores_per_rank=4)


def test_a_trial_that_goes_on_has_the_seeds_of_its_root_and_the_settings_of_its_proposal(planner):
    start = Start(key="k", folder="/runs/t003-f0")
    child = proposal(7, settings={"training.epochs": 9}, parent=3)
    [task, other] = planner.tasks(child, root=3, starts={0: start})
    assert task.seed == planner.tasks(proposal(3))[0].seed
    assert task.training.epochs == 9
    assert (task.start, other.start) == (start, None)
    assert task.id == "t007-f0"


def test_the_users_first_points_come_first_and_the_search_fills_in_what_they_leave_out(edit):
    path = edit(
        "num_parallel = 2",
        """num_parallel = 2
first_points = [{ "training.optimizer.lr" = 0.5 }, { "model.args.width" = 3 }]""",
    )
    file = load(path)
    planner = Planner(file, file.data_files(), Fingerprint(data="d", model="m", code="c"))
    rng = np.random.default_rng(0)
    first = planner.with_first_point(proposal(0), [], rng)
    assert first.point == {"training.optimizer.lr": 0.5, "model.args.width": 4}
    second = planner.with_first_point(proposal(1), [first], rng)
    assert second.point == {"training.optimizer.lr": 0.1, "model.args.width": 3}
    assert planner.with_first_point(proposal(2), [first, second], rng) == proposal(2)
    for promotion in (proposal(1, parent=0), proposal(1, tags={"rung": 1, "promoted_from": 0})):
        assert planner.with_first_point(promotion, [first], rng) == promotion
    later = proposal(9)
    assert planner.with_first_point(later, [proposal(0), proposal(1)], rng).point == {
        "training.optimizer.lr": 0.5,
        "model.args.width": 4,
    }  # added to a study that had begun
