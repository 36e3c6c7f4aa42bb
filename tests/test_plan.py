"""From trials to tasks."""

from __future__ import annotations

import pytest

from apps.contract import Fingerprint
from sites.launchers import Shape
from workflow.plan import Planner, largest_shape, search_rng
from workflow.study import load

POINT = {"training.optimizer.lr": 0.1, "model.args.width": 4}


@pytest.fixture
def planner(study_path) -> Planner:
    file = load(study_path)
    return Planner(file, file.data_files(), Fingerprint(data="d", model="m", code="c"))


def test_a_trial_has_a_task_for_each_fold(planner):
    tasks = planner.tasks(3, POINT)
    assert [task.id for task in tasks] == ["t003-f0", "t003-f1"]
    assert len({task.key() for task in tasks}) == 2


def test_all_trials_share_the_fold_split_and_none_share_seeds(planner):
    tasks = [task for trial in range(20) for task in planner.tasks(trial, POINT)]
    assert len({task.split_seed for task in tasks}) == 1
    assert len({task.seed for task in tasks}) == len(tasks)


def test_a_plan_is_the_same_each_time(planner):
    assert planner.tasks(3, POINT) == planner.tasks(3, POINT)


def test_the_ranks_find_model_and_data_from_any_folder(planner, study_path):
    [task, _] = planner.tasks(0, POINT)
    assert task.model.source == f"{study_path.parent}/my_model.py:Tagger"
    assert task.data.files == [str(study_path.parent / "events.h5")]


def test_the_random_numbers_of_a_proposal_depend_on_study_and_trial_alone():
    assert search_rng(1, 5).random() == search_rng(1, 5).random()
    assert len({search_rng(s, t).random() for s in range(4) for t in range(4)}) == 16


def test_a_slot_holds_the_largest_layout_of_the_space(edit):
    edit('"model.args.width" = { type = "int", low = 2, high = 8 }',
         '"layout.num_workers" = { type = "int", low = 1, high = 3 }\n'
         '"layout.cores_per_rank" = { type = "choice", values = [4, 2] }')  # fmt: skip
    path = edit("walltime_min = 2", "walltime_min = 2\nranks_per_worker = 2")
    assert largest_shape(load(path)) == Shape(num_ranks=6, cores_per_rank=4)
