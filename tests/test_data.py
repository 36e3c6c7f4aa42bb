"""Every event is trained on exactly once an epoch, whatever the ranks, blocks and folds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from training_helpers import classes_h5, make_task, write_h5

from apps.contract import N3LOError, TrainTask
from apps.data import (
    Batch,
    FoldBatches,
    Share,
    class_of_event,
    lacking_classes,
    plan_epoch,
    prepare,
    read_ahead,
    trains,
    validates,
)
from apps.hdf5 import Reader, index_files, parse_field

CPU = torch.device("cpu")


def batches(task: TrainTask, rank: int = 0, num_ranks: int = 1) -> FoldBatches:
    index, fold_of_event = prepare(task.data, task.split_seed)
    share = Share(rank=rank, num_ranks=num_ranks, group_size=num_ranks)
    return FoldBatches(task, index, fold_of_event, share, CPU)


def numbers(several: list[Batch]) -> list[int]:
    """The event numbers in batches whose input is the dataset 'number'."""
    return torch.cat([batch.inputs for batch in several]).long().tolist()


def numbered_task(path: Path, **sections: dict) -> TrainTask:
    sections["data"] = {"inputs": "number", **sections.get("data", {})}
    return make_task([classes_h5(path / "events.h5")], **sections)


# -- fields ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "dataset", "index"),
    [
        ("x", "x", ()),
        ("group/x", "group/x", ()),
        ("jets[:, -6:-1]", "jets", (slice(-6, -1),)),
        ("ECAL[:, 13:38, 0, ::2]", "ECAL", (slice(13, 38), 0, slice(None, None, 2))),
        ("x[:]", "x", ()),
    ],
)
def test_a_field_is_a_dataset_and_slices_of_an_event(text, dataset, index):
    field = parse_field(text)
    assert (field.dataset, field.index) == (dataset, index)


@pytest.mark.parametrize("text", ["x[0]", "x[1:, 2]", "x[::2]"])
def test_the_axis_of_the_events_cannot_be_sliced(text):
    with pytest.raises(N3LOError, match="first axis counts the events"):
        parse_field(text)


@pytest.mark.parametrize(
    "text",
    ["x[:, a]", "x[:, f()]", "x[:, 1.5]", "x[:, True]", "x[:, ::-1]", "x[:", "x[:][0]", "x[:]+1"],
)
def test_a_field_that_is_no_slice_is_refused_and_not_evaluated(text):
    with pytest.raises(N3LOError, match="integers and slices"):
        parse_field(text)


def test_a_sliced_field_gives_the_numbers_that_numpy_gives(tmp_path):
    values = np.arange(70 * 5 * 4, dtype=np.float64).reshape(70, 5, 4)
    path = write_h5(tmp_path / "a.h5", 16, x=values, y=np.zeros(70))
    index = index_files(make_task([path], data={"inputs": "x[:, -3:-1, 2]"}).data)
    (got,) = Reader(index, index.inputs.members).gather(np.array([69, 3, 4]))
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, values[[69, 3, 4], -3:-1, 2])


def test_events_are_numbered_through_all_files(tmp_path):
    values = np.arange(45, dtype=np.float32)
    files = [
        write_h5(tmp_path / f"{i}.h5", 4, x=part, y=part)
        for i, part in enumerate(np.split(values, [10, 11]))
    ]
    index = index_files(make_task(files, data={"block_events": 8}).data)
    (got,) = Reader(index, index.inputs.members).gather(np.arange(45)[::-1])
    assert index.block_starts.tolist() == [0, 8, 10, 11, 19, 27, 35, 43, 45]
    np.testing.assert_array_equal(got, values[::-1])


def test_a_block_is_whole_chunks_and_at_least_64_events(tmp_path):
    for chunk, expected in ((1, 64), (10, 70), (64, 64), (100, 100)):
        path = classes_h5(tmp_path / f"{chunk}.h5", events=200, chunk=chunk)
        assert index_files(make_task([path]).data).block_events == expected


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [("x", torch.Tensor), (["x", "number"], list), ({"a": "x"}, dict), ("group", dict)],
)
def test_fields_reach_the_model_as_one_as_a_list_or_by_name(tmp_path, inputs, expected):
    x = np.zeros((20, 2), np.float32)
    path = write_h5(tmp_path / "a.h5", x=x, number=x, y=np.zeros(20), group__b=x, group__a=x)
    batch = next(iter(batches(make_task([path], data={"inputs": inputs})).training(1)))
    assert isinstance(batch.inputs, expected)
    if inputs == "group":
        assert list(batch.inputs) == ["a", "b"]


def test_numbers_become_float32_and_class_numbers_int64(tmp_path):
    images = np.full((20, 2, 2), 255, np.uint8)
    path = write_h5(
        tmp_path / "a.h5", x=images, d=np.ones(20), pdg=np.arange(20, dtype=np.int32),
        y=np.arange(20, dtype=np.uint8) % 2,
    )  # fmt: skip
    task = make_task([path], data={"inputs": {"image": "x", "d": "d", "pdg": "pdg"}})
    batch = next(iter(batches(task).training(1)))
    assert {name: each.dtype for name, each in batch.inputs.items()} == {
        "image": torch.float32, "d": torch.float32, "pdg": torch.int64,
    }  # fmt: skip
    assert batch.inputs["image"].max() == 255
    assert batch.targets.dtype == torch.int64


# -- mistakes --------------------------------------------------------------------------------------


def refused(*files: Path, **data: object) -> str:
    with pytest.raises(N3LOError) as error:
        index_files(make_task(list(files), data=data).data)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_missing_file_is_named(tmp_path):
    assert str(tmp_path / "no.h5") in refused(tmp_path / "no.h5")


def test_a_truncated_file_is_named(tmp_path):
    path = classes_h5(tmp_path / "a.h5")
    path.write_bytes(path.read_bytes()[:-2000])
    assert f"'{path}' is not a readable HDF5 file (truncated?)" in refused(path)


def test_a_missing_field_lists_those_there_and_the_nearest(tmp_path):
    message = refused(classes_h5(tmp_path / "a.h5"), inputs="numbr")
    assert "there is no 'numbr', only number, x, y" in message
    assert "did you mean 'number'?" in message


def test_a_slice_beyond_the_axis_is_refused(tmp_path):
    assert "does not fit the shape (121, 3)" in refused(
        classes_h5(tmp_path / "a.h5"), inputs="x[:, 3]"
    )


def test_files_that_disagree_are_named(tmp_path):
    first = classes_h5(tmp_path / "a.h5")
    other = write_h5(tmp_path / "b.h5", x=np.zeros((5, 4), np.float32), y=np.zeros(5, np.int32))
    message = refused(first, other)
    assert "b.h5: 'x' is (4,) float32 an event, but (3,) float32 in the first file" in message


def test_inputs_and_targets_of_different_length_are_refused(tmp_path):
    path = write_h5(tmp_path / "a.h5", x=np.zeros(5), y=np.zeros(6))
    assert "'x' has 5, 'y' has 6" in refused(path)


def test_text_is_no_field(tmp_path):
    path = write_h5(tmp_path / "a.h5", x=np.array([b"a", b"b"]), y=np.zeros(2))
    assert "not numbers" in refused(path)


# -- folds -----------------------------------------------------------------------------------------


def test_each_event_validates_in_one_fold_and_classes_are_shared_evenly(tmp_path):
    task = make_task([classes_h5(tmp_path / "a.h5")])
    index, fold = prepare(task.data, 5)
    classes = class_of_event(index)
    assert np.ptp(np.bincount(fold)) <= 1
    for each in range(3):
        assert np.ptp(np.bincount(fold[classes == each], minlength=3)) <= 1


def test_one_hot_targets_are_classes_and_floats_are_not(tmp_path):
    one_hot = np.eye(3, dtype=np.float32)[np.arange(30) % 3]
    path = write_h5(tmp_path / "a.h5", x=one_hot, y=one_hot, z=one_hot * 0.5)
    index = index_files(make_task([path]).data)
    np.testing.assert_array_equal(class_of_event(index), np.arange(30) % 3)
    assert class_of_event(index_files(make_task([path], data={"targets": "z"}).data)) is None


def test_the_split_depends_on_its_seed_alone(tmp_path):
    data = make_task([classes_h5(tmp_path / "a.h5")]).data
    splits = [prepare(data, seed)[1] for seed in (1, 1, 2)]
    np.testing.assert_array_equal(splits[0], splits[1])
    assert (splits[0] != splits[2]).any()


def test_one_fold_validates_on_the_fraction_of_every_class(tmp_path):
    y = np.repeat([0, 1], [80, 20])
    path = write_h5(tmp_path / "a.h5", x=np.zeros(100), y=y)
    task = make_task([path], data={"folds": 1, "validation_fraction": 0.2})
    _, fold = prepare(task.data, 5)
    assert np.bincount(y[fold == 0]).tolist() == [16, 4]
    assert set(fold) == {0, 1}


def test_whole_files_are_dealt_to_folds_of_like_size(tmp_path):
    sizes = [50, 30, 30, 20, 20, 10]
    files = [classes_h5(tmp_path / f"{i}.h5", events=n) for i, n in enumerate(sizes)]
    _, fold = prepare(make_task(files, data={"fold_by": "files"}).data, 5)
    assert sorted(np.bincount(fold)) == [50, 50, 60]
    for part in np.split(fold, np.cumsum(sizes)[:-1]):
        assert len(set(part)) == 1


@pytest.mark.parametrize(
    ("labels", "data", "said"),
    [
        (np.arange(12) // 6, {"fold_by": "files", "folds": 2}, ["learn", "validate"]),
        (np.repeat([0.0, 1.0], 6), {"fold_by": "files", "folds": 2}, ["learn", "validate"]),
        (np.arange(12) == 0, {"folds": 2}, ["learn", "validate"]),
        (np.arange(12) // 10, {"folds": 3}, ["validate"]),
        (np.arange(12) // 6, {"folds": 3}, []),
        (np.arange(12) / 7, {"folds": 3}, []),
        (np.where(np.arange(12) == 1, np.nan, np.arange(12) // 6), {"folds": 3}, []),
        (
            np.where(np.arange(12) < 2, np.inf, np.arange(12) == 5),
            {"folds": 2},
            ["learn", "validate"],
        ),
    ],
)
def test_a_fold_that_lacks_a_class_is_told(tmp_path, labels, data, said):
    files = []
    for number, part in enumerate(np.split(labels, 2)):
        files.append(write_h5(tmp_path / f"{number}.h5", x=np.zeros((6, 3)), y=part))
    task = make_task(files, data=data)
    warnings = list(lacking_classes(task.data, *prepare(task.data, 5)))
    assert [line.split()[2] for line in warnings] == said


@pytest.mark.parametrize("first", [2, np.nan, np.inf])
def test_targets_that_are_all_the_same_are_told(tmp_path, first):
    path = write_h5(tmp_path / "a.h5", x=np.zeros((6, 3)), y=np.array([first, 2, 2, 2, 2, 2.0]))
    task = make_task([path])
    [line] = lacking_classes(task.data, *prepare(task.data, 5))
    assert line == "data.targets: all events are 2, so that there is nothing to learn"


def test_more_folds_than_events_or_files_are_refused(tmp_path):
    path = classes_h5(tmp_path / "a.h5", events=4)
    with pytest.raises(N3LOError, match="5 folds are more than 4 events"):
        prepare(make_task([path], data={"folds": 5}).data, 5)
    with pytest.raises(N3LOError, match="3 folds are more than 1 files"):
        prepare(make_task([path], data={"fold_by": "files"}).data, 5)


def split(path: Path, **data: object) -> np.ndarray:
    return prepare(make_task([path], data=data).data, 5)[1]


def test_a_part_of_the_training_events_leaves_folds_and_validation_as_they_were(tmp_path):
    path = classes_h5(tmp_path / "a.h5")
    for settings in ({"folds": 3}, {"folds": 1}):
        whole, part = (split(path, train_fraction=f, **settings) for f in (1.0, 0.3))
        for fold in range(settings["folds"]):
            np.testing.assert_array_equal(validates(part, fold), validates(whole, fold))
            np.testing.assert_array_equal(trains(whole, fold), whole != fold)
            assert (trains(part, fold) <= trains(whole, fold)).all()


@pytest.mark.parametrize("settings", [
    {"folds": 3}, {"folds": 1}, {"folds": 3, "stratify": False}, {"folds": 2, "fold_by": "files"},
])  # fmt: skip
def test_a_smaller_part_lies_within_every_larger_one(tmp_path, settings):
    files = [classes_h5(tmp_path / f"{name}.h5") for name in "ab"]
    data = make_task(files, data=settings).data
    before = np.zeros(242, bool)
    for fraction in (0.05, 0.1, 0.3, 0.5, 0.9, 1.0):
        used = trains(prepare(replace(data, train_fraction=fraction), 5)[1], 0)
        assert (before <= used).all()
        assert used.sum() > before.sum()
        before = used


def test_a_part_has_its_share_of_every_class_in_every_fold(tmp_path):
    y = np.repeat([0, 1, 2], [600, 240, 60])
    path = write_h5(tmp_path / "a.h5", x=np.zeros(900), y=y)
    part = split(path, train_fraction=0.25)
    shares = [[(y[part == fold] == each).sum() for each in range(3)] for fold in range(3)]
    assert shares == [[50, 20, 5]] * 3


def test_a_part_of_many_small_classes_is_right_as_a_whole(tmp_path):
    """90 classes of 10 events: none of them alone has a whole event in a part of 3%."""
    path = write_h5(tmp_path / "a.h5", x=np.zeros(900), y=np.arange(900) % 90)
    assert (split(path, train_fraction=0.03) >= 0).sum() == pytest.approx(27, abs=3)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_ranks_share_the_part_that_is_used(tmp_path, num_ranks):
    """About a quarter of 80 or 81 training events, in batches of at most 7."""
    task = numbered_task(tmp_path, data={"train_fraction": 0.25})
    ranks = [batches(task, rank, num_ranks) for rank in range(num_ranks)]
    steps = [list(each.training(1)) for each in ranks]
    trained = numbers([batch for each in steps for batch in each])
    validated = [
        number
        for rank, each in enumerate(ranks)
        for number in numbers(list(each.validation(rank, num_ranks)))
    ]
    assert len(set(trained)) == len(trained) == ranks[0].num_train
    assert ranks[0].num_train == pytest.approx(20, abs=3)  # one of each class
    assert len(validated) == ranks[0].num_val == len(set(validated)) >= 40
    assert not set(trained) & set(validated)
    assert {len(each) for each in steps} == {-(-ranks[0].num_train // num_ranks // 7)}


def test_a_part_without_any_event_is_refused(tmp_path):
    with pytest.raises(N3LOError, match="0 training events are too few for 1 ranks"):
        next(iter(batches(numbered_task(tmp_path, data={"train_fraction": 1e-4})).training(1)))


# -- the order of an epoch -------------------------------------------------------------------------


def random_plans(count: int):
    """Plans over random blocks, folds, lanes and batch sizes, with the events to train on."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        blocks = np.concatenate([[0], np.cumsum(rng.integers(1, 90, size=rng.integers(1, 40)))])
        is_training = rng.random(blocks[-1]) < rng.choice([0.3, 0.7, 1.0])
        lanes, batch_size = int(rng.integers(1, 9)), int(rng.integers(1, 70))
        if is_training.sum() >= lanes:
            yield (
                is_training,
                batch_size,
                plan_epoch(blocks, is_training, lanes, batch_size, np.random.default_rng(1)),
            )


def test_every_training_event_comes_exactly_once_an_epoch():
    for is_training, _, plan in random_plans(300):
        events = np.concatenate([np.concatenate(groups) for groups in plan.lanes])
        np.testing.assert_array_equal(np.sort(events), np.flatnonzero(is_training))


def test_all_lanes_take_as_many_steps_with_batches_that_differ_by_one():
    for is_training, batch_size, plan in random_plans(300):
        sizes = plan.batch_sizes
        lane_events = [sum(map(len, groups)) for groups in plan.lanes]
        assert sizes.sum(axis=1).tolist() == lane_events
        assert np.ptp(lane_events) <= 1
        assert (np.ptp(sizes, axis=1) <= 1).all()
        assert sizes.min() >= 1
        assert sizes.max() <= max(batch_size, 2)
        if batch_size > 1:
            largest = -(-int(is_training.sum()) // len(lane_events))
            assert plan.num_steps == -(-largest // batch_size)


def test_fewer_events_than_ranks_are_refused():
    with pytest.raises(N3LOError, match="2 training events are too few for 3 ranks"):
        plan_epoch(np.array([0, 2]), np.ones(2, bool), 3, 1, None)


def test_an_epoch_can_be_repeated_and_epochs_differ(tmp_path):
    data = batches(numbered_task(tmp_path))
    first, again, second = (numbers(list(data.training(epoch))) for epoch in (1, 1, 2))
    assert first == again
    assert first != second
    assert sorted(first) == sorted(second)


def test_events_stay_in_order_without_shuffling(tmp_path):
    got = numbers(list(batches(numbered_task(tmp_path, data={"shuffle": False})).training(1)))
    assert got == sorted(got)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_ranks_share_training_and_validation_without_overlap(tmp_path, num_ranks):
    task = numbered_task(tmp_path)
    ranks = [batches(task, rank, num_ranks) for rank in range(num_ranks)]
    training = [list(each.training(1)) for each in ranks]
    validation = [
        numbers(list(each.validation(rank, num_ranks))) for rank, each in enumerate(ranks)
    ]
    assert len({len(steps) for steps in training}) == 1
    trained = numbers([batch for steps in training for batch in steps])
    validated = [number for share in validation for number in share]
    assert sorted(trained + validated) == list(range(121))
    for step in zip(*training, strict=True):
        assert {batch.num_global for batch in step} == {sum(batch.num_events for batch in step)}


def test_one_rank_with_two_lanes_reads_what_two_ranks_read(tmp_path):
    task = numbered_task(tmp_path)
    one = batches(replace(task, training=replace(task.training, lanes=2)))
    pair = zip(*(batches(task, rank, 2).training(1) for rank in (0, 1)), strict=True)
    assert [numbers([batch]) for batch in one.training(1)] == [numbers(list(each)) for each in pair]


def test_lanes_must_be_a_multiple_of_the_ranks(tmp_path):
    task = numbered_task(tmp_path, training={"lanes": 3})
    with pytest.raises(N3LOError, match="3 is not a multiple of the 2 ranks"):
        batches(task, 0, 2).training(1)


# -- reading ---------------------------------------------------------------------------------------


def test_files_and_memory_give_the_same_batches(tmp_path):
    path = classes_h5(tmp_path / "a.h5", events=3000)
    both = [
        batches(make_task([path], data={"memory_gb": gb}, training={"lanes": 2})) for gb in (0, 1)
    ]
    for ways in (zip(*(each.training(2) for each in both), strict=True),
                 zip(*(each.validation(0, 1) for each in both), strict=True)):  # fmt: skip
        for from_files, from_memory in ways:
            assert torch.equal(from_files.inputs, from_memory.inputs)
            assert torch.equal(from_files.targets, from_memory.targets)


def test_inputs_keep_to_their_targets_through_the_shuffling(tmp_path):
    task = make_task([classes_h5(tmp_path / "a.h5", events=500)])
    for batch in batches(task).training(1):
        assert torch.equal(batch.inputs.argmax(dim=1), batch.targets)


def test_what_the_reading_thread_raises_reaches_the_loop():
    def items():
        yield 1
        raise OSError("disk")

    ahead = read_ahead(items(), 4)
    assert next(ahead) == 1
    with pytest.raises(OSError, match="disk"):
        next(ahead)


def test_the_reading_thread_is_ahead_by_no_more_than_its_depth_and_ends_with_the_loop():
    made = []
    ahead = read_ahead((made.append(i) or i for i in range(100)), 3)
    assert [next(ahead) for _ in range(5)] == [0, 1, 2, 3, 4]
    ahead.close()
    assert len(made) <= 8


def test_damage_inside_a_file_is_named(tmp_path):
    path = tmp_path / "a.h5"
    values = np.random.default_rng(0).normal(size=(200, 50))
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=values, chunks=(50, 50), compression="gzip")
        file["y"] = np.zeros(200)
        place = file["x"].id.get_chunk_info(1)
    content = bytearray(path.read_bytes())
    content[place.byte_offset : place.byte_offset + 200] = bytes(200)
    path.write_bytes(content)
    with pytest.raises(N3LOError, match=r"a.h5: 'x' cannot be read"):
        next(iter(batches(make_task([path])).training(1)))
