"""Transforms that a study names, and the function that gives the model its inputs."""

from __future__ import annotations

import json
import pickle
from dataclasses import MISSING, fields, replace

import h5py
import numpy as np
import pytest
import torch
from training_helpers import classes_h5, make_task, train_all, write_h5, write_task

from apps.check import check, first_events, shapes
from apps.contract import TRANSFORMS, N3LOError, TaskPaths, read_json, read_json_lines, write_json
from apps.data import (
    FoldBatches,
    Share,
    class_of_event,
    make_batch,
    prepare,
    prepare_fold,
    trains,
    validates,
)
from apps.ensemble import Member, ensemble
from apps.experiment import make_experiment
from apps.hdf5 import Reader, index_files
from apps.rules import check_collate
from apps.trained import load_trained, trained_index
from apps.transforms import STEPS, idle_ignores, keep, with_kept
from workflow.fingerprint import fingerprint
from workflow.plan import Planner
from workflow.search.base import Proposal
from workflow.study import load

CPU = torch.device("cpu")


@pytest.fixture
def jets(tmp_path):
    """x (50, 6, 3), padded with zeros after the first constituents; y the class, (50,) of 4."""
    rng = np.random.default_rng(1)
    x = rng.normal([5, -3, 1000], [1, 4, 0.1], size=(50, 6, 3))
    x[np.arange(6) >= rng.integers(1, 7, size=50)[:, None]] = 0
    x[:, :, 1] *= rng.integers(0, 2, size=(50, 6))  # a feature of a real constituent may be 0
    return write_h5(tmp_path / "jets.h5", 8, x=x, y=rng.integers(0, 4, size=50))


@pytest.fixture
def columns(tmp_path):
    """met, mjj, eta and the class y of 30 events in each of two files."""
    rng = np.random.default_rng(6)
    for name in ("a.h5", "b.h5"):
        of_file = {name: rng.normal(size=30) for name in ("met", "mjj", "eta")}
        write_h5(tmp_path / name, 8, **of_file, y=np.arange(30) % 3)
    return [tmp_path / "a.h5", tmp_path / "b.h5"]


def task_of(file, steps, field="x", **data):
    return make_task([file], data={"transforms": {field: steps}, **data})


def given(task, fold=0):
    """What the model gets of all events, and the index and folds behind it."""
    index, fold_of_event = prepare_fold(task.data, task.split_seed, fold)
    arrays = Reader(index, index.fields).gather(np.arange(index.num_events))
    return make_batch(index, arrays, index.num_events, CPU), index, fold_of_event


def stored(file, name="x"):
    with h5py.File(file) as opened:
        return opened[name][:].astype(np.float32)


def close(values, expected):
    np.testing.assert_allclose(values.numpy(), expected, rtol=2e-5, atol=1e-5)


# -- steps that take numbers from the data ---------------------------------------------------------


@pytest.mark.parametrize("fold", [0, 2])
@pytest.mark.parametrize(("per", "axes"), [("feature", (0, 1)), ("cell", 0), ("all", None)])
def test_normalise_takes_mean_and_deviation_of_the_training_events(jets, fold, per, axes):
    batch, _, fold_of_event = given(task_of(jets, [{"name": "normalise", "per": per}]), fold)
    raw = stored(jets).astype(np.float64)
    trained = raw[trains(fold_of_event, fold)]
    close(batch.inputs, (raw - trained.mean(axis=axes)) / trained.std(axis=axes))


def test_large_whole_numbers_are_not_rounded_before_the_shift(tmp_path):
    """Seconds since 1970, in float32, would be known to 128 s."""
    seconds = 1_700_000_000 + np.arange(60) ** 2
    file = write_h5(tmp_path / "times.h5", x=seconds, y=np.arange(60) % 2)
    task = make_task([file], data={"transforms": {"x": ["normalise"]}, "folds": 2})
    batch, _, fold_of_event = given(task, 0)
    trained = seconds[trains(fold_of_event, 0)].astype(np.float64)
    close(batch.inputs, (seconds - trained.mean()) / trained.std())


@pytest.mark.parametrize("per", ["feature", "cell", "all"])
def test_min_max_takes_the_extremes_of_the_training_events(jets, per):
    axes = {"feature": (0, 1), "cell": 0, "all": None}[per]
    batch, _, fold_of_event = given(task_of(jets, [{"name": "min_max", "per": per}]))
    raw = stored(jets).astype(np.float64)
    trained = raw[trains(fold_of_event, 0)]
    low, high = trained.min(axis=axes), trained.max(axis=axes)
    close(batch.inputs, (raw - low) / (high - low))


@pytest.mark.parametrize("step", ["normalise", "min_max"])
@pytest.mark.parametrize("per", ["feature", "cell", "all"])
@pytest.mark.parametrize("data", [{"folds": 3}, {"folds": 1}, {"train_fraction": 0.5}])
def test_events_that_are_not_trained_on_do_not_change_the_numbers(jets, step, per, data):
    """No leakage: whatever validation holds, what the training events become is the same."""
    task = task_of(jets, [{"name": step, "per": per, "ignore": 0}], **data)
    before, index, fold_of_event = given(task)
    trained = trains(fold_of_event, 0)
    assert validates(fold_of_event, 0).any()
    with h5py.File(jets, "r+") as file:
        values = file["x"][:]
        values[~trained] = 1e4 * values[~trained] + 77
        file["x"][:] = values
    after, index_after, fold_after = given(task)
    assert np.array_equal(fold_of_event, fold_after)
    assert keep(index) == keep(index_after)
    assert torch.equal(before.inputs[trained], after.inputs[trained])
    with h5py.File(jets, "r+") as file:  # and the training events do
        file["x"][int(np.flatnonzero(trained)[0])] += 1.0
    assert keep(given(task)[1]) != keep(index)


def test_each_fold_has_numbers_of_its_own(jets):
    numbers = [keep(given(task_of(jets, ["normalise"]), fold)[1]) for fold in range(3)]
    assert numbers[0] != numbers[1] != numbers[2] != numbers[0]


def test_padding_takes_no_part_and_stays(jets):
    """Per feature it is what is 0 in all features, not a single 0 of a real constituent."""
    batch, _, fold_of_event = given(task_of(jets, [{"name": "normalise", "ignore": 0}]))
    raw = stored(jets).astype(np.float64)
    real = (raw != 0).any(axis=2)
    trained = trains(fold_of_event, 0)
    counted = raw[trained][real[trained]]
    expected = np.where(real[..., None], (raw - counted.mean(axis=0)) / counted.std(axis=0), 0)
    assert (batch.inputs.numpy()[~real] == 0).all()
    np.testing.assert_allclose(batch.inputs.numpy(), expected, rtol=1e-3, atol=1e-3)


def test_cells_that_are_ignored_one_by_one(jets):
    steps = [{"name": "normalise", "per": "all", "ignore": 0}]
    batch, _, fold_of_event = given(task_of(jets, steps))
    raw = stored(jets).astype(np.float64)
    counted = raw[trains(fold_of_event, 0)]
    counted = counted[counted != 0]
    close(batch.inputs, np.where(raw == 0, 0, (raw - counted.mean()) / counted.std()))


def test_numbers_far_from_zero_keep_their_deviation(tmp_path):
    """The sum of squares minus the square of the sum would cancel here, in any precision."""
    x = (16_000_000 + np.random.default_rng(2).integers(0, 4, size=(5000, 1))).astype(np.float32)
    file = write_h5(tmp_path / "far.h5", 64, x=x, y=np.zeros(5000, np.int64))
    _, index, fold_of_event = given(task_of(file, ["normalise"]))
    trained = x[trains(fold_of_event, 0)].astype(np.float64)
    [step] = index.inputs.members[0].steps
    assert step.shift == pytest.approx([trained.mean()], rel=1e-15)
    assert step.width == pytest.approx([trained.std()], rel=1e-9)


def test_what_does_not_vary_is_only_moved(tmp_path):
    x = np.full((40, 2), 0.1, np.float32)
    file = write_h5(tmp_path / "same.h5", 8, x=x, y=np.zeros(40, np.int64))
    for step in ("normalise", "min_max"):
        assert given(task_of(file, [step]))[0].inputs.abs().max() < 1e-7


def test_whole_numbers_and_single_numbers_are_normalised_too(jets):
    batch, _, fold_of_event = given(task_of(jets, ["normalise"], "y"))
    raw = stored(jets, "y")
    trained = raw[trains(fold_of_event, 0)]
    close(batch.targets, (raw - trained.mean()) / trained.std())


def test_earlier_steps_come_first(jets):
    steps = [{"name": "clip", "low": 0.5}, "log1p", "normalise", {"name": "crop", "first": 2}]
    batch, _, fold_of_event = given(task_of(jets, steps))
    raw = np.log1p(stored(jets).astype(np.float64).clip(min=0.5))
    trained = raw[trains(fold_of_event, 0)]
    close(batch.inputs, ((raw - trained.mean(axis=(0, 1))) / trained.std(axis=(0, 1)))[:, :2])


def test_values_that_are_not_finite_are_no_statistics_and_are_told_where_they_are(jets):
    with h5py.File(jets, "r+") as file:
        file["x"][:, 0, 0] = np.nan
    said = r"'x': normalise: nan or inf: place 0 of the last axis in (\d+) of \1 training events"
    with pytest.raises(N3LOError, match=said):
        given(task_of(jets, ["normalise"]))


def test_the_columns_and_the_first_event_with_nan_are_named_with_the_remedy(columns):
    field = "(met, mjj, eta)[:, :2]"
    task = make_task(columns, data={"inputs": field, "transforms": {field: ["normalise"]}})
    _, fold_of_event = prepare(task.data, task.split_seed)
    trained = np.flatnonzero(trains(fold_of_event, 0))
    last = trained[-3:]
    with h5py.File(columns[1], "r+") as file:
        file["mjj"][last - 30] = [np.nan, np.inf, np.nan]
    with pytest.raises(N3LOError) as raised:
        given(task)
    assert str(raised.value) == (
        f"data.transforms: '{field}': normalise: nan or inf: 'mjj' in 3 of {len(trained)} training "
        f"events, first in event {last[0] - 30} of 'b.h5'; before it, "
        '{ name = "replace", by = 0 } puts 0 there'
    )


def test_single_values_that_an_event_lacks_take_no_part_and_can_become_the_mean(columns):
    """As analysts write them: -999 in one of several columns."""
    with h5py.File(columns[0], "r+") as file:
        file["mjj"][3:25] = -999
    field = "(met, mjj, eta)"
    steps = [{"name": "normalise", "ignore": -999}, {"name": "replace", "value": -999, "by": 0}]
    task = make_task(columns, data={"inputs": field, "transforms": {field: steps}})
    batch, index, fold_of_event = given(task)
    [raw] = Reader(index, [index.inputs.members[0]]).gather(np.arange(60))
    masked = np.ma.masked_equal(raw.astype(np.float64), -999)
    trained = masked[trains(fold_of_event, 0)]
    close(batch.inputs, ((masked - trained.mean(axis=0)) / trained.std(axis=0)).filled(0))


@pytest.mark.parametrize(
    ("per", "ignore", "warnings"), [("feature", -999, 1), ("feature", 0, 0), ("cell", -999, 0)]
)
def test_a_value_that_is_ignored_in_no_row_is_told(jets, per, ignore, warnings):
    with h5py.File(jets, "r+") as file:
        file["x"][:, 0, 1] = -999
    task = task_of(jets, [{"name": "normalise", "per": per, "ignore": ignore}])
    _, index, fold_of_event = given(task)
    told = list(idle_ignores(index, trains(fold_of_event, 0)))
    assert len(told) == warnings
    assert all("normalise: -999 is in no whole row of features" in line for line in told)


@pytest.mark.parametrize(
    ("field", "per", "blocks"),
    [("x", "feature", 1), ("x", "cell", 0), ("x", "all", 0), ("x[:, 0]", "feature", 0)],
)
def test_data_are_read_for_ignored_values_only_until_a_row_is_found(
    jets, field, per, blocks, monkeypatch
):
    steps = [{"name": "normalise", "per": per, "ignore": 0}]
    task = task_of(jets, steps, field, inputs=field, block_events=8)
    _, index, fold_of_event = given(task)
    read = []
    gather = Reader.gather
    monkeypatch.setattr(Reader, "gather", lambda *each: read.append(each) or gather(*each))
    assert list(idle_ignores(index, trains(fold_of_event, 0))) == []
    assert len(read) == blocks


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({"by": 0}, [1, 0, 0, 0, -9]), ({"by": 2.5, "value": -9}, [1, np.nan, np.inf, -np.inf, 2.5])],
)
def test_a_value_or_what_is_not_finite_is_replaced(settings, expected):
    values = torch.tensor([1, np.nan, np.inf, -np.inf, -9])
    np.testing.assert_array_equal(STEPS["replace"](**settings)(values), expected)


# -- all other steps -------------------------------------------------------------------------------

OTHERS = {
    "log": ({"floor": 1e-3}, lambda x: np.log(np.maximum(x, 1e-3))),
    "clip": ({"low": -1, "high": 2.5}, lambda x: x.clip(-1, 2.5)),
    "scale": ({"by": 0.01, "offset": 3}, lambda x: 0.01 * x + 3),
    "threshold": ({"below": 4}, lambda x: np.where(x < 4, 0, x)),
    "replace": ({"value": 0, "by": -1.5}, lambda x: np.where(x == 0, -1.5, x)),
    "crop": ({"to": [3, 2]}, lambda x: x[:, 1:4, 0:2]),
    "crop ": ({"to": [1], "axes": [2]}, lambda x: x[:, :, 1:2]),
    "crop  ": ({"first": 4}, lambda x: x[:, :4]),
    "crop   ": ({"first": 2, "axes": [2]}, lambda x: x[:, :, :2]),
    "pad": (
        {"to": [8], "value": -1},
        lambda x: np.pad(x, [(0, 0), (0, 2), (0, 0)], "constant", constant_values=-1),
    ),
    "pad ": ({"to": [5], "axes": [2]}, lambda x: np.pad(x, [(0, 0), (0, 0), (0, 2)])),
    "channel_axis": ({}, lambda x: x[:, None]),
    "channel_axis ": ({"at": "last"}, lambda x: x[..., None]),
    "transpose": ({"axes": [2, 1]}, lambda x: x.transpose(0, 2, 1)),
    "flatten": ({}, lambda x: x.reshape(len(x), -1)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_step_does_what_numpy_does(jets, name):
    arguments, expected = OTHERS[name]
    batch, index, _ = given(task_of(jets, [{"name": name.strip(), **arguments}]))
    close(batch.inputs, expected(stored(jets)))
    assert batch.inputs.is_contiguous()
    assert shapes(index.inputs) == f"(B, {', '.join(map(str, batch.inputs.shape[1:]))})"


def test_classes_become_one_hot_and_back(jets):
    y = stored(jets, "y").astype(int)
    task = task_of(jets, [{"name": "one_hot", "classes": 4}], "y")
    batch, index, _ = given(task)
    assert torch.equal(batch.targets, torch.eye(4)[y])
    assert np.array_equal(class_of_event(index), y)  # the folds know the classes still
    back = task_of(jets, [{"name": "one_hot", "classes": 4}, "class_number"], "y")
    assert torch.equal(given(back)[0].targets, torch.from_numpy(y))


def test_class_numbers_that_are_stored_as_floats_are_classes_again(tmp_path, jets):
    y = stored(jets, "y")
    file = write_h5(tmp_path / "floats.h5", x=stored(jets), y=y[:, None])
    targets = given(task_of(file, ["class_number"], "y"))[0].targets
    assert torch.equal(targets, torch.from_numpy(y).long())


def test_every_step_of_the_contract_is_there_with_its_arguments():
    assert set(STEPS) == set(TRANSFORMS)
    for name, step in STEPS.items():
        own = [each for each in fields(step) if each.name not in ("_on", "shift", "width")]
        needed, optional = TRANSFORMS[name]
        assert {each.name for each in own if each.default is MISSING} == set(needed)
        assert {each.name for each in own if each.default is not MISSING} == set(optional)


def test_transforms_change_neither_what_is_held_nor_other_fields(jets):
    plain = make_task([jets])
    task = task_of(jets, [{"name": "crop", "first": 2}])
    share = Share(rank=0, num_ranks=1, group_size=1)
    data = FoldBatches(task, *prepare_fold(task.data, 5, 0), share, CPU)
    other = FoldBatches(plain, *prepare_fold(plain.data, 5, 0), share, CPU)
    for batch, same in zip(data.training(1), other.training(1), strict=True):
        assert torch.equal(batch.inputs, same.inputs[:, :2])
        assert torch.equal(batch.targets, same.targets)


# -- what a study says -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (["normalize"], "transforms.x: there is no step 'normalize', only channel_axis, "),
        ([{"by": 2}], "transforms.x: there is no step None, only "),
        ([{"name": "scale", "factor": 2}], "'scale' has no 'factor'; it takes by, offset"),
        (["log"], "transforms.x: 'log' needs floor; it takes floor"),
        ([{"name": "flatten", "axes": 1}], "'flatten' has no 'axes'; it takes no arguments"),
        ([{"name": "crop", "to": [float("nan")]}], "'crop': to = .* is not finite"),
    ],
)
def test_a_wrong_name_is_refused_when_the_study_is_read(jets, steps, said):
    with pytest.raises(ValueError, match=said):
        task_of(jets, steps)


@pytest.mark.parametrize(
    ("field", "step", "said"),
    [
        ("z", "flatten", "there is no field 'z' in data.inputs and data.targets, only x, y"),
        ("x", {"name": "crop", "to": [7]}, "'x': crop: 7 are more than the 6 of axis 1"),
        ("x", {"name": "crop", "to": 7}, r"crop: to = 7: whole numbers of at least 1"),
        ("x", {"name": "crop", "to": [1], "axes": [3]}, r"there is no axis 3, only \[1, 2\]"),
        ("x", {"name": "crop"}, "crop: needs either 'to' or 'first'"),
        ("x", {"name": "pad", "to": [2]}, "pad: to 2 are fewer than the 6 of axis 1"),
        ("x", {"name": "scale", "by": "2"}, "scale: by = '2' is not a number"),
        ("x", {"name": "clip", "low": 2, "high": 1}, "clip: low = 2 is above high = 1"),
        ("x", {"name": "log", "floor": 0}, "log: floor = 0 is not above 0"),
        ("x", {"name": "normalise", "per": "jet"}, "per = 'jet': feature, cell or all"),
        ("x", {"name": "transpose", "axes": [0, 1]}, "whole numbers of at least 1"),
        ("x", {"name": "transpose", "axes": [1]}, r"axes = \[1\], but there are \[1, 2\]"),
        ("x", {"name": "one_hot", "classes": 4}, "'x': one_hot: needs one number an event"),
    ],
)
def test_a_step_that_does_not_suit_the_data_is_one_line_of_the_check(jets, field, step, said):
    with pytest.raises(N3LOError, match=said) as raised:
        check(task_of(jets, [step], field))
    assert "\n" not in str(raised.value)


def test_a_class_that_is_none_is_found_wherever_it_is(tmp_path):
    y = np.repeat([0, 1, 2, 3], [30, 30, 30, 1])
    file = write_h5(tmp_path / "four.h5", x=np.ones((91, 3)), y=y)
    with pytest.raises(N3LOError, match="'y': one_hot: 3 is none of the classes 0 to 2"):
        check(task_of(file, [{"name": "one_hot", "classes": 3}], "y"))


def test_the_check_tells_what_the_model_gets(jets):
    task = task_of(jets, ["normalise", {"name": "crop", "first": 1}, "flatten"])
    report = check(
        replace(task, model=replace(task.model, args={"in_features": 3, "out_features": 4}))
    )
    assert report["inputs"] == {"x": {"shape": [3], "dtype": "float32"}}
    wrong = make_task(
        [jets],
        data={"transforms": {"x": [{"name": "crop", "first": 2}]}},
        model={"args": {"in_features": 5, "out_features": 4}},
    )
    with pytest.raises(N3LOError, match=r"fails on the first batch.*inputs are \(B, 2, 3\)"):
        check(wrong)


def test_fields_of_a_table_are_named_as_there(jets):
    task = task_of(jets, ["flatten"], "jets", inputs={"jets": "x", "first": "x[:, 0]"})
    batch = given(task)[0]
    assert batch.inputs["jets"].shape == (50, 18)
    assert batch.inputs["first"].shape == (50, 3)


def test_a_name_of_two_fields_is_refused(jets):
    task = task_of(jets, ["flatten"], "y", inputs={"y": "x"})
    with pytest.raises(N3LOError, match="'y' is x and y; give one of them another name"):
        given(task)


def test_a_study_with_transforms_is_read_and_its_mistakes_have_a_line(study_path, edit):
    path = edit(
        "folds = 2", 'folds = 2\ntransforms.x = ["normalise", { name = "scale", by = 0.5 }]'
    )
    assert load(path).study.data.transforms == {"x": ["normalise", {"name": "scale", "by": 0.5}]}
    edit('"normalise", ', '"normalice", ')
    with pytest.raises(N3LOError, match=r"small.toml:13: data: transforms.x: there is no step"):
        load(path)


def test_transforms_are_not_searched(edit):
    path = edit('"model.args.width" =', '"data.transforms.x" =')
    with pytest.raises(N3LOError, match=r"'data.transforms.x' cannot be searched: it is the same"):
        load(path)


def test_another_transform_is_another_task(jets):
    tasks = [make_task([jets]), *(task_of(jets, [step]) for step in ("normalise", "min_max"))]
    assert len({task.key() for task in tasks}) == 3


# -- what is kept ----------------------------------------------------------------------------------


def test_the_kept_numbers_give_the_same_on_other_files(jets, tmp_path):
    steps = [{"name": "normalise", "ignore": 0}, "flatten", {"name": "min_max", "per": "cell"}]
    batch, index, _ = given(task_of(jets, steps))
    content = json.loads(json.dumps(keep(index)))
    part = write_h5(tmp_path / "part.h5", x=stored(jets)[:7], y=stored(jets, "y")[:7].astype(int))
    other = with_kept(index_files(make_task([part]).data), content)
    assert other.inputs.members[0].steps == index.inputs.members[0].steps
    assert torch.equal(first_events(other, 7).inputs, batch.inputs[:7])
    assert pickle.loads(pickle.dumps(index)) == index  # as it goes to the other ranks


# -- whole trainings -------------------------------------------------------------------------------

TWO_RANKS = {
    "layout": {"num_workers": 2},
    "training": {"strategy": "allreduce", "backend": "ddp", "epochs": 2},
}


@pytest.mark.mpi
def test_two_ranks_train_as_one_with_transforms_and_keep_the_numbers(tmp_path):
    file = classes_h5(tmp_path / "a.h5")
    data = {"transforms": {"x": ["normalise"], "y": [{"name": "one_hot", "classes": 3}]}}
    one = make_task([file], data=data, training={"epochs": 2, "lanes": 2})
    two = make_task([file], data=data, **TWO_RANKS)
    train_all(1, write_task(tmp_path / "one", one))
    train_all(2, write_task(tmp_path / "two", two))
    rows = [read_json_lines(TaskPaths(tmp_path / name).history) for name in ("one", "two")]
    for alone, together in zip(*rows, strict=True):
        for measured in ("loss", "val_loss"):
            assert together[measured] == pytest.approx(alone[measured], rel=1e-5)

    numbers = [read_json(TaskPaths(tmp_path / name).transforms) for name in ("one", "two")]
    assert numbers[0] == numbers[1]
    _, fold_of_event = prepare(two.data, two.split_seed)
    trained = stored(file)[trains(fold_of_event, 0)].astype(np.float64)
    assert numbers[1]["x"][0]["shift"] == pytest.approx(trained.mean(axis=0).tolist())
    task, experiment = load_trained(tmp_path / "two", CPU)
    judged = experiment.evaluate(first_events(trained_index(tmp_path / "two", task)))
    assert torch.isfinite(judged).all()
    members = [Member(name, [tmp_path / name]) for name in ("one", "two")]
    best = min(row["val_loss"] for row in rows[0])
    assert ensemble(members).single.ravel() == pytest.approx([best, best], rel=1e-5)
    numbers[1]["y"] = [{"name": "one_hot", "classes": 4}]
    write_json(TaskPaths(tmp_path / "two").transforms, numbers[1])
    with pytest.raises(N3LOError, match=r"two: data.transforms gives its targets other numbers"):
        ensemble(members)


# -- collate ---------------------------------------------------------------------------------------

GRAPHS = """\
import torch

class Nodes:
    def __init__(self, x, batch):
        self.x, self.batch = x, batch

def graph(inputs):
    real = (inputs != 0).any(dim=2)
    batch = torch.arange(len(inputs))[:, None].expand(real.shape)
    return Nodes(inputs[real], batch[real]), len(inputs)

def broken(inputs):
    return inputs["jets"]

NUMBER = 3

class Tagger(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 4)

    def forward(self, nodes, num_jets):
        assert isinstance(nodes, Nodes)
        sums = torch.zeros(num_jets, 4, dtype=nodes.x.dtype)
        return sums.index_add(0, nodes.batch, self.layer(nodes.x))
"""


@pytest.fixture
def graphs(tmp_path):
    path = tmp_path / "graphs.py"
    path.write_text(GRAPHS)
    return path


def collated(jets, graphs, name):
    model = {"source": f"{graphs}:Tagger", "args": {}}
    return make_task([jets], model=model, data={"collate": f"{graphs}:{name}"})


def test_the_model_is_called_with_what_collate_gives(jets, graphs):
    task = collated(jets, graphs, "graph")
    assert check(task)["inputs"] == {"x": {"shape": [6, 3], "dtype": "float32"}}
    experiment = make_experiment(task.model, task.training, collate=task.data.collate)
    model = experiment.networks["model"]
    batch = given(task)[0]
    x = batch.inputs
    real = (x != 0).any(dim=2)
    expected = (model.layer(x) * real[..., None]).sum(dim=1)
    outputs = experiment.forward(model, x)
    torch.testing.assert_close(outputs, expected)
    pieces = [experiment.forward(model, piece.inputs) for piece in batch.cut(3)]
    torch.testing.assert_close(torch.cat(pieces), expected)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("broken", r"data.collate 'graphs.py:broken': IndexError: .* \(graphs.py line 13\)"),
        ("grahp", "data.collate 'graphs.py:grahp': there is no 'grahp', only Nodes, graph, broken"),
        ("NUMBER", "data.collate 'graphs.py:NUMBER': is a int, not a function"),
    ],
)
def test_a_collate_that_fails_is_one_line(jets, graphs, name, said):
    with pytest.raises(N3LOError, match=said):
        check(collated(jets, graphs, name))


def test_networks_that_are_called_in_another_way_take_no_collate(jets, graphs):
    own = graphs.with_name("own.py")
    own.write_text("class Own:\n    experiment = None\n")
    task = collated(jets, graphs, "graph")
    model = replace(task.model, source=f"{own}:Own")
    with pytest.raises(N3LOError, match=r"data.collate: is for a torch.nn.Module, .* 'own.py:Own'"):
        make_experiment(model, task.training, collate=task.data.collate)


@pytest.mark.parametrize(
    ("training", "layout", "said"),
    [
        ({"strategy": "tensor"}, {"ranks_per_worker": 2}, "'tensor' divides the model"),
        ({"strategy": "pipeline"}, {"ranks_per_worker": 2}, "'pipeline' divides the model"),
        ({}, {"gpus_per_rank": 2}, "needs layout.gpus_per_rank of 0 or 1"),
    ],
)
def test_a_model_that_is_divided_takes_no_collate(jets, graphs, training, layout, said):
    task = make_task([jets], training=training, layout=layout, data={"collate": f"{graphs}:graph"})
    with pytest.raises(ValueError, match=f"^data.collate: {said}"):
        check_collate(task.data, task.training, task.layout)
    check_collate(replace(task.data, collate=None), task.training, task.layout)


def test_a_changed_collate_is_another_model(study_path, edit, graphs, tmp_path):
    path = edit("folds = 2", 'folds = 2\ncollate = "graphs.py:graph"')
    file = load(path)

    def digest():
        return fingerprint(file, file.data_files(), tmp_path / "memo.json").model

    before = digest()
    graphs.write_text(GRAPHS + "# changed\n")
    assert digest() != before
    planner = Planner(file, file.data_files(), fingerprint(file, file.data_files(), tmp_path / "m"))
    [task, _] = planner.tasks(Proposal(settings={}, point={}, number=0))
    assert task.data.collate == f"{graphs}:graph"
    moved = replace(task, data=replace(task.data, collate="/elsewhere/graphs.py:graph"))
    assert moved.key() == task.key()


def test_a_collate_that_is_not_there_is_named_with_its_line(edit, tmp_path):
    file = load(edit("folds = 2", 'folds = 2\ncollate = "graphs.py:graph"'))
    with pytest.raises(N3LOError, match=r"small.toml:13: data.collate: there is no file"):
        fingerprint(file, file.data_files(), tmp_path / "memo.json")
