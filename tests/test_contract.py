"""What passes between driver and ranks: keys, files, torn lines."""

from __future__ import annotations

import dataclasses
import json

import pytest

from apps.contract import (
    Data,
    EarlyStopping,
    Fingerprint,
    Layout,
    Model,
    Objective,
    Start,
    Training,
    TrainTask,
    append_json_line,
    is_better,
    read_json_lines,
    write_json,
)


@pytest.fixture
def task() -> TrainTask:
    return TrainTask(
        study="s",
        trial=3,
        fold=1,
        seed=7,
        split_seed=8,
        model=Model(source="/home/me/my_model.py:Tagger", args={"width": 4}),
        data=Data(files=["/data/a.h5"], inputs="x", targets={"label": "y"}, folds=3),
        training=Training(early_stopping=EarlyStopping(patience=2), clip_norm=1.0),
        layout=Layout(num_workers=2),
        objective=Objective(goal="min"),
        fingerprint=Fingerprint(data="d", model="m", code="c"),
        start=Start(key="p", folder="/runs/s/t001-f1"),
        keep_state=True,
    )


def test_a_task_comes_back_from_its_file_as_it_was(task, tmp_path):
    task.write(tmp_path / "task.json")
    assert TrainTask.read(tmp_path / "task.json") == task


def test_a_task_is_named_so_that_names_sort_and_can_be_typed(task):
    assert task.id == "t003-f1"


SAME_RESULT = [
    {"study": "other"},
    {"trial": 99},
    {"model": Model(source="/scratch/my_model.py:Tagger", args={"width": 4})},
    {"data": Data(files=["/b.h5"], inputs="x", targets={"label": "y"}, folds=3, memory_gb=9)},
    {"layout": Layout(num_workers=2, walltime_min=1.0)},
    {"training": Training(
        early_stopping=EarlyStopping(patience=2), clip_norm=1.0, tensorboard=True
    )},
    {"start": Start(key="p", folder="/scratch/t009-f1")},
]  # fmt: skip
OTHER_RESULT = [
    {"fold": 2},
    {"seed": 9},
    {"split_seed": 9},
    {"model": Model(source="/home/me/my_model.py:Tagger", args={"width": 4.0})},
    {"data": Data(files=["/data/a.h5"], inputs="x", targets={"label": "z"}, folds=3)},
    {"data": Data(
        files=["/data/a.h5"], inputs="x", targets={"label": "y"}, folds=3, train_fraction=0.5
    )},
    {"data": Data(
        files=["/data/a.h5"], inputs="x", targets={"label": "y"}, folds=3, file_numbers=[1.0]
    )},
    {"training": Training(epochs=11)},
    {"layout": Layout(num_workers=1, ranks_per_worker=2)},
    {"objective": Objective(goal="max")},
    {"fingerprint": Fingerprint(data="d", model="edited", code="c")},
    {"start": Start(key="q", folder="/runs/s/t001-f1")},
    {"start": None},
    {"keep_state": False},
]  # fmt: skip


@pytest.mark.parametrize("change", SAME_RESULT, ids=str)
def test_what_cannot_change_a_result_is_not_in_the_key(task, change):
    assert dataclasses.replace(task, **change).key() == task.key()


@pytest.mark.parametrize("change", OTHER_RESULT, ids=str)
def test_what_can_change_a_result_is_in_the_key(task, change):
    assert dataclasses.replace(task, **change).key() != task.key()


def test_a_torn_line_is_left_out_and_does_not_swallow_the_next(tmp_path):
    path = tmp_path / "lines.jsonl"
    append_json_line(path, {"n": 1})
    whole = path.read_bytes()
    append_json_line(path, {"n": 2})
    for cut in range(len(whole) + 1, path.stat().st_size):
        torn = tmp_path / "torn.jsonl"
        torn.write_bytes(path.read_bytes()[:cut])
        append_json_line(torn, {"n": 3})
        rows = [row["n"] for row in read_json_lines(torn)]
        complete = cut == path.stat().st_size - 1  # only the line's end was cut off
        assert rows == ([1, 2, 3] if complete else [1, 3])


def test_a_file_that_cannot_be_written_whole_leaves_the_old_one(tmp_path):
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.1])
def test_a_part_of_the_training_events_is_above_zero_and_at_most_all(fraction):
    with pytest.raises(ValueError, match=f"train_fraction: {fraction} is not above 0 and at most"):
        Data(files=["a.h5"], inputs="x", targets="y", train_fraction=fraction)


def test_better_means_by_more_than_min_delta():
    assert is_better(0.4, 0.5, "min")
    assert not is_better(0.4, 0.5, "min", min_delta=0.2)
    assert is_better(0.6, 0.5, "max")
    assert not is_better(0.5, 0.5, "max")
    assert is_better(9.0, None, "min")
