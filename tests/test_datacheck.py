"""`data check` says what is in files and what is slow there; `data convert` writes better ones."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import uproot
from pyarrow import parquet
from training_helpers import make_task, write_h5

from apps import convert, data, datacheck
from apps.contract import N3LOError, write_json
from apps.formats import open_file
from workflow import datafiles
from workflow.cli import main

RNG = np.random.default_rng(8)
X = RNG.normal(size=(300, 4)).astype(np.float32)
Y = np.arange(300) % 3


def checked(*paths: Path) -> list[dict]:
    return datacheck.of_files([str(path) for path in paths])


def array(file: dict, name: str) -> dict:
    return next(each for each in file["arrays"] if each["name"] == name)


def advice(path: Path, **datasets: object) -> list[str]:
    """Of a file with these datasets, each a dict of what `create_dataset` takes."""
    with h5py.File(path, "w") as file:
        for name, settings in datasets.items():
            file.create_dataset(name, **settings)
    [found] = checked(path)
    return found["advice"]


# -- data check ------------------------------------------------------------------------------------


def test_the_statistics_are_those_of_numpy(tmp_path, monkeypatch):
    monkeypatch.setattr(datacheck, "READ_BYTES", 1000)  # in many parts
    x = X.copy()
    x[:100] = 0
    x[7, 2], x[8, 1] = np.nan, -np.inf
    [file] = checked(write_h5(tmp_path / "a.h5", 16, x=x))
    facts, finite = array(file, "x"), x[np.isfinite(x)]
    assert (facts["events"], facts["shape"], facts["dtype"]) == (300, [4], "float32")
    assert (facts["min"], facts["max"]) == (finite.min(), finite.max())
    assert facts["mean"] == pytest.approx(finite.mean(dtype=np.float64))
    assert facts["zeros"] == pytest.approx((x == 0).mean())
    assert facts["non_finite"] == 2
    assert "x: 2 of 1200 values are not finite (nan or inf)" in file["advice"]


@pytest.mark.parametrize("values", [Y, np.eye(3)[Y], Y.astype(np.uint8)])
def test_class_numbers_and_one_hot_targets_have_a_balance(tmp_path, values):
    [file] = checked(write_h5(tmp_path / "a.h5", y=values))
    assert array(file, "y")["classes"] == {0: 100, 1: 100, 2: 100}


@pytest.mark.parametrize("values", [X, np.arange(300), X[:, 0], np.ones((300, 3))])
def test_other_numbers_have_none(tmp_path, values):
    [file] = checked(write_h5(tmp_path / "a.h5", y=values))
    assert array(file, "y")["classes"] is None


def test_a_rare_class_and_a_constant_are_told(tmp_path):
    found = advice(tmp_path / "a.h5", y={"data": np.arange(300) == 5}, c={"data": np.ones(300)})
    assert found == ["c: all values are 1", "y: class 1 is rare: 1 events, 0.33%"]


def test_texts_are_named_as_not_usable(tmp_path):
    [file] = checked(write_h5(tmp_path / "a.h5", x=X, names=np.array([b"pt", b"eta"])))
    mend = "class numbers are numpy.unique(texts, return_inverse=True)[1]"
    assert array(file, "names")["error"] == f"'names' holds |S3, not numbers; {mend}"
    assert "not usable: 'names' holds |S3" in datacheck.written(file)


@pytest.mark.parametrize("statistics", [True, False])  # of Parquet, in which nulls are counted
def test_whole_numbers_that_are_missing_are_told_and_others_looked_at(tmp_path, capsys, statistics):
    frame = pd.DataFrame({"n": pd.array([1, None, 3], "Int32"), "x": [1.0, 2.0, 4.0]})
    frame.to_parquet(tmp_path / "a.parquet", write_statistics=statistics)
    assert datacheck.main([str(tmp_path / "a.parquet")]) == 0
    shown = capsys.readouterr().out
    assert (
        "not usable: 'n' lacks 1 values (null); fill them in, as in frame['n'].fillna(-1)" in shown
    )
    assert "  x           3" in shown


def test_a_number_that_stands_for_what_was_not_measured_is_told(tmp_path):
    values = np.where(Y == 0, -999, X[:, 0])
    found = advice(tmp_path / "a.h5", m={"data": values}, once={"data": np.minimum(X[:, 0], 0)})
    [line] = found
    assert line.startswith("m: -999 is 100 of 300 values, and the smallest")


def test_a_file_without_events_is_told(tmp_path):
    parquet.write_table(
        pa.table({"pt": pa.array([], pa.list_(pa.float32())), "y": pa.array([], pa.int64())}),
        tmp_path / "a.parquet",
    )
    [file] = checked(tmp_path / "a.parquet")
    assert file["advice"] == ["no events"]


def test_trees_of_other_names_are_told(tmp_path):
    for name in ("Events", "nominal"):
        with uproot.recreate(tmp_path / f"{name}.root") as file:
            file[name] = {"x": X[:, 0]}
    _, other = checked(tmp_path / "Events.root", tmp_path / "nominal.root")
    assert other["advice"][0].startswith("its trees are nominal, and Events in ")
    assert ": ROOT, tree nominal, " in datacheck.written(other)


def test_the_classes_of_several_files_are_counted_together(tmp_path, capsys):
    """With a class a file, no file alone says anything of their balance."""
    paths = [
        str(write_h5(tmp_path / f"{label}.h5", x=X[:size], y=np.full(size, label)))
        for label, size in ((0, 75), (1, 225))
    ]
    assert datacheck.main(paths) == 0
    shown = capsys.readouterr().out
    assert "all values are" not in shown
    assert shown.endswith("all 2 files together:\n  y: 2 classes, 0: 25.0%, 1: 75.0%\n")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"shape": (9, 3000, 100), "chunks": (9, 3000, 100), "compression": "lzf"}, "decodes to"),
        ({"shape": (300, 2), "chunks": (1, 2)}, "chunks of 1 events hold 8 bytes"),
        ({"shape": (300, 40, 40), "chunks": (300, 20, 10)}, "spread over 8 chunks"),
        ({"shape": (300,), "chunks": (300,), "compression": "gzip", "compression_opts": 9}, "gzip"),
        ({"shape": (3000, 1000)}, "100% zeros, not compressed (12 MB)"),
    ],
)
def test_what_is_slow_to_read_is_told(tmp_path, settings, said):
    assert any(said in line for line in advice(tmp_path / "a.h5", x={"dtype": "f4", **settings}))


def test_good_files_need_no_advice(tmp_path):
    values = {"data": X, "chunks": (64, 4), "compression": "lzf"}
    assert advice(tmp_path / "a.h5", x=values, y={"data": Y}) == []


def test_a_large_row_group_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(datacheck, "LARGE_GROUP_BYTES", 1000)
    parquet.write_table(pa.table({"x": X[:, 0], "y": X[:, 1]}), tmp_path / "a.parquet")
    [file] = checked(tmp_path / "a.parquet")
    assert file["advice"][0].startswith("a row group decodes to 2.4 kB")


def test_the_lengths_of_events_are_told(tmp_path):
    pt = [[1.0] * (event % 5) for event in range(100)]
    parquet.write_table(pa.table({"pt": pt}), tmp_path / "a.parquet")
    [file] = checked(tmp_path / "a.parquet")
    assert array(file, "pt")["lengths"] == [0, 2.0, 4]
    assert "pt: events have 0 to 4 values; 'pt[:, :4]' keeps all of 99 % of them" in str(file)


def test_a_file_that_differs_from_the_first_is_told(tmp_path):
    first = write_h5(tmp_path / "a.h5", x=X, y=Y, z=Y)
    other = write_h5(tmp_path / "b.h5", x=X[:, :2], y=Y, extra=Y)
    assert [line.partition(f" '{first}'")[0] for line in checked(first, other)[1]["advice"]] == [
        "lacks z, which",
        "has extra, which",
        "x: (2,) float32 an event, but (4,) float32 in",
    ]


def test_arrays_of_different_lengths_are_told(tmp_path):
    [file] = checked(write_h5(tmp_path / "a.h5", x=X, y=Y[:-1]))
    assert file["advice"] == ["arrays differ in their number of events: x has 300, y has 299"]


def test_of_a_study_its_fields_are_looked_at(tmp_path):
    path = write_h5(tmp_path / "a.h5", x=X, y=np.eye(3)[Y], unused=X)
    task = make_task([path], data={"inputs": "(x, unused)[:, 1:]", "targets": "y[:, :2]"})
    [file] = datacheck.of_study(task.data)
    assert [(each["name"], each["shape"]) for each in file["arrays"]] == [
        ("(x, unused)[:, 1:]", [3, 2]),
        ("y[:, :2]", [2]),
    ]


def test_of_a_study_the_number_of_the_file_is_looked_at_too(tmp_path):
    paths = [write_h5(tmp_path / name, x=X) for name in ("a.h5", "b.h5")]
    task = make_task(paths, data={"targets": "@file", "file_numbers": [4, 2]})
    files = datacheck.of_study(task.data)
    assert [array(file, "@file")["mean"] for file in files] == [4, 2]
    assert datacheck.together(files)["classes"]["@file"] == {2: 300, 4: 300}


def test_the_same_as_json(tmp_path, capsys):
    path = write_h5(tmp_path / "a.h5", x=np.full((4, 2), np.nan), y=np.arange(4))
    write_json(tmp_path / "data.json", dataclasses.asdict(make_task([path]).data))
    assert datacheck.main(["--json", "--study", str(tmp_path / "data.json"), "--", str(path)]) == 0
    files = json.loads(capsys.readouterr().out)["files"]
    assert [array(file, "x")["mean"] for file in files] == [None, None]


def test_the_classes_are_those_of_the_training():
    assert datacheck.MOST_CLASSES == data.MOST_CLASSES


# -- data convert ----------------------------------------------------------------------------------


def converted(*words: object) -> None:
    options = [str(word) for word in words]
    assert convert.main(options) == 0


def refused(capsys, *words: object) -> str:
    assert convert.main([str(word) for word in words]) == 2
    [line] = capsys.readouterr().err.splitlines()
    return line


def test_all_arrays_of_several_files_become_one_file(tmp_path, monkeypatch):
    monkeypatch.setattr(convert, "COPIED_BYTES", 3000)  # in many parts
    for number, part in enumerate((slice(0, 130), slice(130, 300))):
        write_h5(tmp_path / f"{number}.h5", 7, group__x=X[part], y=Y[part])
    converted(tmp_path / "0.h5", tmp_path / "1.h5", "--to", tmp_path / "new/out.h5")
    with h5py.File(tmp_path / "new/out.h5") as file:
        np.testing.assert_array_equal(file["group/x"], X)
        np.testing.assert_array_equal(file["y"], Y)
        assert (file["y"].dtype, file["y"].compression, file["y"].shuffle) == (Y.dtype, "lzf", True)


def test_columns_of_a_frame_become_named_arrays(tmp_path):
    frame = pd.DataFrame(X, columns=["f_1", "f_2", "f_3", "pt"]).assign(label=Y, kind="jet")
    frame.to_parquet(tmp_path / "a.parquet", row_group_size=70)
    converted(
        tmp_path / "a.parquet", "--to", tmp_path / "a.h5", "--fields", "x=f_*", "pt", "y=label"
    )
    with h5py.File(tmp_path / "a.h5") as file:
        assert sorted(file) == ["pt", "x", "y"]
        np.testing.assert_array_equal(file["x"], X[:, :3])


def test_one_file_becomes_several(tmp_path):
    np.savez(tmp_path / "a.npz", x=X, y=Y)
    converted(tmp_path / "a.npz", "--to", tmp_path / "a.h5", "--events-per-file", 128)
    parts = []
    for path in sorted(tmp_path.glob("a_*.h5")):
        with h5py.File(path) as file:
            parts.append(file["x"][:])
    assert [len(part) for part in parts] == [128, 128, 44]
    np.testing.assert_array_equal(np.concatenate(parts), X)


def test_what_cannot_be_converted_is_left_out_and_told(tmp_path, capsys):
    write_h5(tmp_path / "a.h5", x=X, names=np.array([b"pt"]))
    converted(tmp_path / "a.h5", "--to", tmp_path / "b.h5")
    assert "left out: 'names' holds |S2, not numbers" in capsys.readouterr().out
    with h5py.File(tmp_path / "b.h5") as file:
        assert list(file) == ["x"]


def test_units_are_kept_and_the_source_is_named(tmp_path):
    write_h5(tmp_path / "a.h5", x=X)
    with h5py.File(tmp_path / "a.h5", "a") as file:
        file["x"].attrs["unit"] = "GeV"
    converted(tmp_path / "a.h5", "--to", tmp_path / "b.h5")
    with h5py.File(tmp_path / "b.h5") as file:
        assert (file["x"].attrs["unit"], file.attrs["converted_from"]) == ("GeV", '["a.h5"]')


@pytest.mark.parametrize(
    ("event_bytes", "events"), [(62500, 16), (4, 1024), (2**20, 1), (10**7, 1), (9600, 64)]
)
def test_a_chunk_is_about_a_mebibyte_or_what_is_shuffled_together(event_bytes, events):
    assert convert.chunk_events(event_bytes) == events


def test_what_was_converted_needs_no_advice(tmp_path):
    ecal = np.zeros((70, 25, 25, 25), np.float32)
    ecal[:, 12, 12] = RNG.random((70, 25))
    write_h5(tmp_path / "a.h5", 1, ECAL=ecal, energy=X[:70, 0])
    converted(tmp_path / "a.h5", "--to", tmp_path / "b.h5")
    [file] = checked(tmp_path / "b.h5")
    assert file["advice"] == []


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (["(x, x)"], "needs a name for what is written: 'x=(x, x)'"),
        (["x", "x=y"], "'x' is written twice"),
        (["z"], "there is no 'z', only x, y"),
        (["x[:, 9]"], "does not fit the shape (300, 4)"),
    ],
)
def test_a_wrong_field_is_one_line(tmp_path, capsys, fields, said):
    path = write_h5(tmp_path / "a.h5", x=X, y=Y)
    line = refused(capsys, path, "--to", tmp_path / "b.h5", "--fields", *fields)
    assert said in line
    assert not (tmp_path / "b.h5").exists()


def test_the_number_of_the_file_becomes_a_dataset(tmp_path):
    for name, part in (("a", slice(0, 130)), ("b", slice(130, 300))):
        write_h5(tmp_path / f"{name}.h5", x=X[part])
    words = (tmp_path / "a.h5", tmp_path / "b.h5", "--to", tmp_path / "c.h5")
    converted(*words, "--fields", "x", "y=@file")
    with h5py.File(tmp_path / "c.h5") as file:
        np.testing.assert_array_equal(file["y"], np.arange(300) >= 130)


def test_a_frame_of_pytables_is_not_converted_by_the_names_of_its_layout(tmp_path, capsys):
    path = write_h5(tmp_path / "a.h5", df__block0_values=X)
    with h5py.File(path, "r+") as file:
        file["df"].attrs["pandas_type"] = np.bytes_("frame")
    line = refused(capsys, path, "--to", tmp_path / "b.h5")
    assert line.endswith("pandas.read_hdf('a.h5').to_parquet('frame.parquet')")


def test_arrays_beside_a_frame_of_pytables_are_converted_and_the_frame_is_told(tmp_path, capsys):
    arrays = {"x": X, "df/block0_values": X[:9], "df/axis1": X[:9, 0], "old/df/axis1": X[:9, 0]}
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name, values in arrays.items():
            file[name] = values
        for name in ("df", "old/df"):
            file[name].attrs["pandas_type"] = np.bytes_("frame")
    converted(tmp_path / "a.h5", "--to", tmp_path / "b.h5")
    told = capsys.readouterr().out
    for name in ("df", "old/df"):
        assert f"left out: '{name}' is a frame as pandas' to_hdf writes them" in told
        assert f"pandas.read_hdf('a.h5', '{name}').to_parquet" in told
    with h5py.File(tmp_path / "b.h5") as file:
        assert list(file) == ["x"]
    with open_file(str(tmp_path / "a.h5")) as source:  # "@file" has a row for each event
        assert source.num_events == len(X)


def test_an_existing_file_is_not_replaced(tmp_path, capsys):
    path = write_h5(tmp_path / "a.h5", x=X)
    assert "is there already" in refused(capsys, path, "--to", path)
    with h5py.File(path) as file:
        np.testing.assert_array_equal(file["x"], X)


def test_files_that_do_not_fit_each_other_are_refused(tmp_path, capsys):
    first, other = write_h5(tmp_path / "a.h5", x=X), write_h5(tmp_path / "b.h5", x=X[:, :2])
    line = refused(capsys, first, other, "--to", tmp_path / "c.h5")
    assert f"{other}: 'x' is (2,) an event, but (4,) in '{first}'" in line


def test_a_disk_that_is_full_ends_in_one_line_and_leaves_nothing_behind(tmp_path):
    path = write_h5(tmp_path / "a.h5", x=RNG.random((5000, 10)))
    code = (
        "import resource, sys; from apps.convert import main;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000)); sys.exit(main(sys.argv[1:]))"
    )
    words = [sys.executable, "-P", "-c", code, str(path), "--to", str(tmp_path / "b.h5")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == f"'{tmp_path / 'b.h5'}' cannot be written: File too large\n"
    assert [each.name for each in tmp_path.iterdir()] == ["a.h5"]


# -- the command -----------------------------------------------------------------------------------


def test_the_command_converts_and_checks(tmp_path, capfd):
    np.savez(tmp_path / "a.npz", pt=X[:, 0], eta=X[:, 1], y=Y)
    out = str(tmp_path / "a.h5")
    fields = ["--fields", "x=(pt, eta)", "y"]
    assert main(["data", "convert", str(tmp_path / "a.npz"), "--to", out, *fields]) == 0
    assert capfd.readouterr().out.splitlines() == [out]
    assert main(["data", "check", "--json", out]) == 0
    [file] = json.loads(capfd.readouterr().out)["files"]
    assert [(each["name"], each["shape"]) for each in file["arrays"]] == [("x", [2]), ("y", [])]


def test_a_pattern_that_the_shell_has_left_is_expanded(tmp_path):
    names = ["my ntuples/a.h5", "my ntuples/b.h5", "run[1].h5"]
    (tmp_path / "my ntuples").mkdir()
    for name in names:
        write_h5(tmp_path / name, x=X)
    found = datafiles.found([tmp_path / "my ntuples/*.h5", tmp_path / "run[1].h5"])
    assert found == [tmp_path / name for name in names]
    with pytest.raises(N3LOError, match=r"no file matches '.*/\*.root'"):
        datafiles.found([tmp_path / "*.root"])


def test_the_command_checks_the_data_of_a_study(study_path, capfd):
    assert main(["data", "check", str(study_path)]) == 0
    shown = capfd.readouterr().out
    assert shown.startswith(f"{study_path.parent / 'events.h5'}: HDF5, ")
    assert "y: 2 classes" in shown


def test_a_missing_library_ends_in_the_line_that_installs_it(tmp_path, capfd, monkeypatch):
    (tmp_path / "stub").mkdir()
    (tmp_path / "stub/uproot.py").write_text("raise ModuleNotFoundError(name='uproot')")
    (tmp_path / "a.root").write_bytes(b"root")
    folders = [str(tmp_path / "stub"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(folders).rstrip(os.pathsep))
    assert main(["data", "check", str(tmp_path / "a.root")]) == 2
    said = f"uproot is not installed in {sys.prefix}: pip install 'n3lo[root]'"
    assert said in capfd.readouterr().err
