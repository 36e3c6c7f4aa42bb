"""The same events, read from each format, are the same events."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import awkward as ak
import h5py
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
import uproot
from pyarrow import parquet
from training_helpers import make_task, write_h5

from apps import convert, datacheck
from apps.check import check
from apps.contract import N3LOError
from apps.data import FoldBatches, InMemory, Share, prepare
from apps.formats import open_file
from apps.formats.hdf5 import Hdf5
from apps.hdf5 import Index, Reader, index_files, parse_field
from apps.rows import needed_length, pad
from apps.staging import stage
from workflow.study import load

EVENTS = 130
RNG = np.random.default_rng(3)
X = RNG.normal(size=(EVENTS, 3)).astype(np.float32)
Y = X.argmax(axis=1)
ENDINGS = ["h5", "npz", "npy", "parquet", "root"]


def columns() -> dict[str, np.ndarray]:
    return {"pt": X[:, 0], "eta": X[:, 1], "phi": X[:, 2], "y": Y}


def write_columns(path: Path, rows: slice = slice(None)) -> Path:
    """The columns pt, eta, phi and y in the format of the suffix."""
    named = {name: values[rows] for name, values in columns().items()}
    if path.suffix == ".h5":
        return write_h5(path, 20, **named)
    if path.suffix == ".npz":
        np.savez(path, **named)
    elif path.suffix == ".npy":
        np.save(path, pd.DataFrame(named).to_records(index=False))
    elif path.suffix == ".parquet":
        parquet.write_table(pa.table(named), path, row_group_size=30)
    else:
        write_tree(path, **named)
    return path


def write_tree(path: Path, name: str = "Events", step: int = 40, **branches: object) -> Path:
    """A TTree whose baskets hold `step` events."""
    arrays = {key: ak.Array(values) for key, values in branches.items()}
    with uproot.recreate(path) as file:
        tree = file.mktree(name, {key: str(each.type.content) for key, each in arrays.items()})
        for first in range(0, len(next(iter(arrays.values()))), step):
            tree.extend({key: each[first : first + step] for key, each in arrays.items()})
    return path


def indexed(*files: Path, **data: object) -> Index:
    return index_files(make_task(list(files), data=data).data)


def read(index: Index, events: object = None) -> list[np.ndarray]:
    numbers = np.arange(index.num_events) if events is None else np.asarray(events)
    reader = Reader(index, index.fields)
    try:
        return reader.gather(numbers)
    finally:
        reader.close()


def refused(*files: Path, **data: object) -> str:
    with pytest.raises(N3LOError) as error:
        read(indexed(*files, **data))
    assert "\n" not in str(error.value)
    return str(error.value)


# -- every format ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ENDINGS)
def test_events_of_several_files_are_the_same_in_any_order(tmp_path, ending):
    parts = slice(0, 71), slice(71, None)
    files = [write_columns(tmp_path / f"{part.start}.{ending}", part) for part in parts]
    index = indexed(*files, inputs="(pt, eta, phi)", targets="y")
    order = np.random.default_rng(0).permutation(EVENTS)
    x, y = read(index, order)
    np.testing.assert_array_equal(x, X[order])
    np.testing.assert_array_equal(y, Y[order])
    assert (x.dtype, y.dtype) == (np.float32, np.int64)
    np.testing.assert_array_equal(InMemory(index).gather(order)[0], X[order])


@pytest.mark.parametrize("ending", ENDINGS)
def test_batches_of_an_epoch_are_those_of_hdf5(tmp_path, ending):
    def inputs(path: Path) -> torch.Tensor:
        task = make_task(
            [path], data={"inputs": "(pt, eta, phi)", "block_events": 16, "memory_gb": 0.0}
        )
        index, fold_of_event = prepare(task.data, task.split_seed)
        share = Share(rank=0, num_ranks=1, group_size=1)
        source = FoldBatches(task, index, fold_of_event, share, torch.device("cpu"))
        return torch.cat([batch.inputs for batch in source.training(1)])

    expected = inputs(write_columns(tmp_path / "expected.h5"))
    assert torch.equal(inputs(write_columns(tmp_path / f"a.{ending}")), expected)


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_copy_on_the_node_is_read_as_its_source(tmp_path, ending):
    path = write_columns(tmp_path / f"a.{ending}")
    [copy] = stage([str(path)], str(tmp_path / "cache"))
    assert copy != path
    np.testing.assert_array_equal(read(indexed(copy, inputs="(pt, eta, phi)"))[0], X)


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_file_cut_off_is_said_to_be_of_its_format(tmp_path, ending):
    path = write_columns(tmp_path / f"a.{ending}")
    path.write_bytes(path.read_bytes()[:100])
    kinds = {"h5": "HDF5", "npz": "NumPy", "npy": "NumPy", "parquet": "Parquet", "root": "ROOT"}
    message = refused(path, inputs="pt")
    assert f"'{path}' is not a readable {kinds[ending]} file (truncated?)" in message


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_name_that_is_not_there_is_told_with_those_that_are(tmp_path, ending):
    message = refused(write_columns(tmp_path / f"a.{ending}"), inputs="(pt, etta)")
    assert "there is no 'etta', only eta, phi, pt, y; did you mean 'eta'?" in message


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_file_that_is_not_there_is_named(tmp_path, ending):
    assert f"no.{ending}' does not exist" in refused(tmp_path / f"no.{ending}")


def test_an_unknown_format_is_told_with_those_that_are_read(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("pt,y\n1,2\n")
    message = refused(path)
    assert message.endswith(
        "a.csv' is none of what is read: HDF5 (.h5, .hdf5, .hdf), NumPy (.npz, .npy), "
        "Parquet (.parquet, .pq), ROOT (.root); data.reader names a function of yours that reads "
        "others"
    )


def test_hdf5_is_known_by_its_content_too(tmp_path):
    path = write_columns(tmp_path / "a.h5").rename(tmp_path / "events")
    np.testing.assert_array_equal(read(indexed(path, inputs="pt"))[0], X[:, 0])


def test_a_folder_is_no_file(tmp_path):
    (tmp_path / "a.parquet").mkdir()
    assert "is a folder; name the files in it" in refused(tmp_path / "a.parquet")


def test_reading_hdf5_loads_no_other_library(tmp_path):
    path = write_columns(tmp_path / "a.h5")
    code = (
        "import sys; from apps.hdf5 import open_file;"
        f"open_file({str(path)!r}).find('(pt, eta)')[(slice(0, 2),)];"
        "assert not {'pyarrow', 'uproot', 'awkward', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


def test_a_missing_library_is_named_with_what_to_install(tmp_path, monkeypatch):
    path = write_columns(tmp_path / "a.root")
    monkeypatch.setitem(sys.modules, "uproot", None)
    assert "uproot is not installed in" in (message := refused(path))
    assert message.endswith("pip install 'n3lo[root]'")


@pytest.mark.parametrize("ending", ["npz", "parquet"])
def test_values_that_are_broken_are_told_with_their_file(tmp_path, ending):
    path, x = tmp_path / f"a.{ending}", RNG.integers(0, 100, 20_000)
    if ending == "npz":
        np.savez_compressed(path, x=x, y=x)
    else:
        parquet.write_table(pa.table({"x": x, "y": x}), path, use_dictionary=False)
    content = bytearray(path.read_bytes())
    middle = len(content) // 4  # of x
    content[middle : middle + 50] = bytes(50)
    path.write_bytes(content)
    assert f"{path}: 'x' cannot be read: " in refused(path)
    with pytest.raises(N3LOError, match="'x' cannot be read: "):
        datacheck.of_files([str(path)])


@pytest.mark.parametrize("ending", ["npz", "parquet", "root"])
def test_the_check_before_a_study_reads_all_formats(tmp_path, ending):
    path = write_columns(tmp_path / f"a.{ending}")
    report = check(make_task([path], data={"inputs": "(pt, eta, phi)"}))
    assert (report["events"], report["classes"]) == (EVENTS, np.bincount(Y).tolist())
    assert report["inputs"] == {"(pt, eta, phi)": {"shape": [3], "dtype": "float32"}}


def test_a_study_that_names_a_folder_is_told_to_name_files(edit):
    study = load(edit('files = ["events.h5"]', 'files = ["."]'))
    with pytest.raises(N3LOError, match=r"small.toml:\d+: data.files: '.' is a folder; name the"):
        study.data_files()


# -- several columns as one ------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_pattern_takes_columns_in_the_order_of_their_numbers(tmp_path, ending):
    values = {f"feature_{number}": X[:, 0] * number for number in (10, 2, 1)}
    path = tmp_path / f"a.{ending}"
    if ending == "h5":
        write_h5(path, **values, y=Y)
    elif ending == "npz":
        np.savez(path, **values, y=Y)
    elif ending == "npy":
        np.save(path, pd.DataFrame({**values, "y": Y}).to_records(index=False))
    elif ending == "parquet":
        pd.DataFrame({**values, "y": Y}).to_parquet(path)
    else:
        write_tree(path, **values, y=Y)
    x, _ = read(indexed(path, inputs="feature_*"))
    np.testing.assert_array_equal(x, X[:, :1] * np.array([1, 2, 10], np.float32))


def test_what_a_pattern_found_in_the_first_file_is_asked_of_the_others(tmp_path):
    first = write_h5(tmp_path / "a.h5", f_1=X[:, 0], f_2=X[:, 1], y=Y)
    other = write_h5(tmp_path / "b.h5", f_1=X[:, 0], f_3=X[:, 1], y=Y)
    assert "b.h5: there is no 'f_2'" in refused(first, other, inputs="f_*")


def test_stacked_arrays_are_indexed_behind_the_parenthesis(tmp_path):
    a, b = RNG.normal(size=(2, 20, 7)).astype(np.float32)
    path = write_h5(tmp_path / "a.h5", 8, a=a, b=b, y=np.zeros(20))
    x, _ = read(indexed(path, inputs="(a, b)[:, 2:4]"))
    np.testing.assert_array_equal(x, np.stack([a, b], axis=-1)[:, 2:4])


def test_one_column_in_parentheses_is_a_matrix_of_one_column(tmp_path):
    x, _ = read(indexed(write_columns(tmp_path / "a.parquet"), inputs="(pt)"))
    np.testing.assert_array_equal(x, X[:, :1])


def test_arrays_of_different_shapes_cannot_be_stacked(tmp_path):
    path = write_h5(tmp_path / "a.h5", a=X, b=X[:, :2], y=Y)
    assert "not 'a' (130, 3) and 'b' (130, 2)" in refused(path, inputs="(a, b)")


def test_an_index_within_a_stack_is_refused():
    with pytest.raises(N3LOError, match="behind the parenthesis"):
        parse_field("(a[:, 1], b)")


# -- NumPy -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("order", ["C", "F"])
def test_an_npz_is_read_as_numpy_reads_it(tmp_path, save, order):
    x = np.asarray(RNG.normal(size=(50, 4, 2)), order=order)
    save(tmp_path / "a.npz", x=x, group=X, y=np.zeros(50, np.uint8))
    got, _ = read(indexed(tmp_path / "a.npz", inputs="x[:, 1:3, 1]"))
    np.testing.assert_array_equal(got, x[:, 1:3, 1].astype(np.float32))


def test_one_npy_gives_inputs_and_targets(tmp_path):
    np.save(tmp_path / "a.npy", np.column_stack([X, Y]))
    index = indexed(tmp_path / "a.npy", inputs="data[:, :-1]", targets="data[:, -1]")
    np.testing.assert_array_equal(read(index)[0], X)


def test_only_the_rows_that_are_asked_for_are_taken_from_a_stored_array(tmp_path):
    np.savez(tmp_path / "a.npz", x=X)
    with open_file(str(tmp_path / "a.npz")) as file:
        assert isinstance(file.find("x")._values, np.memmap)


def test_objects_are_not_unpickled(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.array([{}, []], object), y=np.zeros(2))
    assert "'x' holds Python objects, which are not read" in refused(tmp_path / "a.npz")


# -- Parquet ---------------------------------------------------------------------------------------


def test_a_block_is_a_row_group(tmp_path):
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"x": X[:, 0], "y": Y}), path, row_group_size=100)
    assert indexed(path).block_starts.tolist() == [0, 100, 130]


def test_only_row_groups_that_are_asked_for_are_decoded_and_each_once(tmp_path):
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"x": X[:, 0], "y": Y}), path, row_group_size=30)
    rows = open_file(str(path)).find("x")
    decoded, decode = [], rows._decode
    rows._decode = lambda number: decoded.append(number) or decode(number)
    for first, end in pairwise([40, 50, 59, 61]):
        np.testing.assert_array_equal(rows[(slice(first, end),)], X[first:end, 0])
    assert decoded == [1, 2]


def test_lists_of_one_length_are_an_axis(tmp_path):
    x = RNG.normal(size=(40, 4, 2))
    table = {
        "fixed": pa.FixedSizeListArray.from_arrays(x.ravel(), 8),
        "lists": pa.array(x[:, :, 0].tolist()),
        "nested": pa.array(x.tolist()),
        "y": np.zeros(40),
    }
    parquet.write_table(pa.table(table), tmp_path / "a.parquet", row_group_size=15)
    fields = ["fixed", "lists", "nested"]
    *got, _ = read(indexed(tmp_path / "a.parquet", inputs=fields))
    for values, expected in zip(got, [x.reshape(40, 8), x[:, :, 0], x], strict=True):
        np.testing.assert_allclose(values, expected, rtol=1e-6)


def test_frames_with_an_index_and_nullable_types_are_read(tmp_path):
    frame = pd.DataFrame({"x": pd.array([1.5, None, 2.0], "Float64"), "y": [True, False, True]})
    frame.set_index(pd.Index([5, 6, 7])).to_parquet(tmp_path / "a.parquet")
    x, y = read(indexed(tmp_path / "a.parquet"))
    np.testing.assert_array_equal(x, [1.5, np.nan, 2.0])
    np.testing.assert_array_equal(y, [1, 0, 1])


def test_a_missing_class_number_is_not_made_up(tmp_path):
    frame = pd.DataFrame({"x": [1.0, 2.0], "y": pd.array([1, None], "Int64")})
    frame.to_parquet(tmp_path / "a.parquet")
    said = "'y' lacks 1 values (null); fill them in, as in frame['y'].fillna(-1)"
    assert said in refused(tmp_path / "a.parquet")


def test_the_columns_of_a_parquet_file_are_looked_up_once(tmp_path, monkeypatch):
    frame = pd.DataFrame(np.arange(80).reshape(2, 40), columns=[f"c{each}" for each in range(40)])
    frame.to_parquet(tmp_path / "a.parquet")
    asked = []
    schema = property(lambda file: asked.append(file) or file.metadata.schema)
    monkeypatch.setattr(parquet.ParquetFile, "schema", schema)
    with open_file(str(tmp_path / "a.parquet")) as file:
        assert len([*file.usable()]) == 40
    assert len(asked) == 1


@pytest.mark.parametrize("kind", ["string", "category"])
def test_texts_are_told_how_to_become_class_numbers(tmp_path, kind):
    frame = pd.DataFrame({"x": [1.0, 2.0], "y": pd.array(["W", "Z"], "string").astype(kind)})
    frame.to_parquet(tmp_path / "a.parquet")
    assert "frame['y'].astype('category').cat.codes" in refused(tmp_path / "a.parquet")


def test_lists_that_differ_after_the_first_row_group_are_told(tmp_path):
    x = [[1.0, 2.0]] * 20 + [[1.0]] * 10
    parquet.write_table(pa.table({"x": x, "y": np.zeros(30)}), tmp_path / "a.parquet", 15)
    assert "'x' has 1 values in event 20, and 2 in the first" in refused(tmp_path / "a.parquet")


def test_lists_that_are_of_one_length_by_chance_are_padded_as_others(tmp_path):
    """In one file, in its first row group; another file shows that they are not."""
    for number, x in enumerate([[[1.0, 2.0], [3.0, 4.0], [5.0]], [[6.0], [7.0, 8.0, 9.0]]]):
        table = pa.table({"x": x, "z": x, "y": np.zeros(len(x))})
        parquet.write_table(table, tmp_path / f"{number}.parquet", row_group_size=2)
    files = [tmp_path / "0.parquet", tmp_path / "1.parquet"]
    expected = [[1, 2, 0], [3, 4, 0], [5, 0, 0], [6, 0, 0], [7, 8, 9]]
    x, _ = read(indexed(*files, inputs="x[:, :3]"))
    assert x.tolist() == expected
    both, _ = read(indexed(*files, inputs="(x, z)[:, :3]"))
    assert both[:, :, 1].tolist() == expected


# -- events with different numbers of values -------------------------------------------------------

JAGGED = [[1.0, 2.0, 3.0], [], [4.0], [5.0, 6.0]]
PADDED = np.array([[1, 2], [0, 0], [4, 0], [5, 6]], np.float32)


def write_jagged(path: Path) -> Path:
    if path.suffix == ".root":
        return write_tree(path, step=3, pt=JAGGED, eta=JAGGED, y=[0, 1, 0, 1])
    table = pa.table({"pt": JAGGED, "eta": JAGGED, "y": [0, 1, 0, 1]})
    parquet.write_table(table, path, row_group_size=3)
    return path


@pytest.mark.parametrize("ending", ["root", "parquet"])
def test_an_index_says_to_which_length_events_are_padded(tmp_path, ending):
    path = write_jagged(tmp_path / f"a.{ending}")
    x, leading, stacked, _ = read(
        indexed(path, inputs=["pt[:, :2]", "pt[:, 0]", "(pt, eta)[:, :2]"]), [3, 0, 1, 2]
    )
    np.testing.assert_array_equal(x, PADDED[[3, 0, 1, 2]])
    np.testing.assert_array_equal(leading, PADDED[[3, 0, 1, 2], 0])
    np.testing.assert_array_equal(stacked, np.stack([PADDED, PADDED], axis=-1)[[3, 0, 1, 2]])


@pytest.mark.parametrize("ending", ["root", "parquet"])
@pytest.mark.parametrize("field", ["pt", "pt[:, -2:]", "(pt, eta)"])
def test_without_a_length_the_way_to_give_one_is_told(tmp_path, ending, field):
    message = refused(write_jagged(tmp_path / f"a.{ending}"), inputs=field)
    assert "different number of values in each event; say how many to take" in message


def test_padding_is_that_of_awkward():
    counts, values = RNG.integers(0, 5, 30), RNG.normal(size=200)
    values = values[: counts.sum()]
    expected = ak.fill_none(ak.pad_none(ak.unflatten(values, counts), 3, clip=True), 0)
    np.testing.assert_array_equal(pad(counts, values, 3), ak.to_numpy(expected))


@pytest.mark.parametrize(
    ("axes", "length"),
    [((slice(None, 4),), 4), ((slice(2, 9, 3), 0), 9), ((0,), 1), ((-1,), None), ((), None)],
)
def test_an_index_asks_for_so_many_values(axes, length):
    assert needed_length(axes) == length


def test_particles_of_different_collections_are_not_mixed(tmp_path):
    path = write_tree(tmp_path / "a.root", pt=JAGGED, other=JAGGED[::-1], y=[0, 1, 0, 1])
    assert "'other' has another number of values than 'pt'" in refused(
        path, inputs="(pt, other)[:, :2]"
    )


# -- ROOT ------------------------------------------------------------------------------------------


def test_a_tree_is_named_where_there_are_several(tmp_path):
    path = tmp_path / "a.root"
    with uproot.recreate(path) as file:
        for name, factor in (("signal", 1), ("dir/background", 2)):
            tree = file.mktree(name, {"x": np.float32, "y": np.int32})
            tree.extend({"x": X[:, 0] * factor, "y": Y.astype(np.int32)})
    x, _ = read(indexed(path, inputs="dir/background/x", targets="dir/background/y"))
    np.testing.assert_array_equal(x, X[:, 0] * 2)
    assert "there is no 'x', only dir/background/x, dir/background/y, signal/x" in refused(path)


def test_the_only_tree_may_be_named_and_its_branches_given_by_name(tmp_path):
    path = write_columns(tmp_path / "a.root")
    np.testing.assert_array_equal(read(indexed(path, inputs="Events/pt"))[0], X[:, 0])
    assert "; its tree is called 'Events'" in refused(path, inputs="nominal/pt")
    index = indexed(path, inputs="Events")
    assert [field.name for field in index.inputs.members] == ["pt", "eta", "phi", "y"]


def test_the_trees_of_new_root_are_read_too(tmp_path):
    path = tmp_path / "a.root"
    with uproot.recreate(path) as file:
        file.mkrntuple("Events", {"x": X[:4, 0], "pt": ak.Array(JAGGED), "y": Y[:4]})
    x, pt, _ = read(indexed(path, inputs=["x", "pt[:, :2]"]))
    np.testing.assert_array_equal(x, X[:4, 0])
    np.testing.assert_array_equal(pt, PADDED)


def test_arrays_of_a_fixed_size_are_an_axis(tmp_path):
    with uproot.recreate(tmp_path / "a.root") as file:
        tree = file.mktree("Events", {"x": (np.float32, (3,)), "y": np.int64})
        tree.extend({"x": X, "y": Y})
    np.testing.assert_array_equal(
        read(indexed(tmp_path / "a.root", inputs="x[:, 1:]"))[0], X[:, 1:]
    )


# -- layouts of the field --------------------------------------------------------------------------


def test_jets_of_hls4ml_are_read(tmp_path):
    """https://zenodo.org/records/3602260: constituents, and truth among the features."""
    constituents, jets = RNG.normal(size=(12, 150, 16)), np.zeros((12, 59))
    jets[:, -6:-1] = np.eye(5)[np.arange(12) % 5]
    names = np.array([b"j_pt", b"j_eta"])
    path = write_h5(
        tmp_path / "jets.h5", jetConstituentList=constituents, jets=jets, jetFeatureNames=names
    )
    index = indexed(path, inputs="jetConstituentList", targets="jets[:, -6:-1]")
    assert [field.shape for field in index.fields] == [(150, 16), (5,)]
    assert read(index)[1].argmax(axis=1).tolist() == [event % 5 for event in range(12)]


def test_showers_of_lcd_are_read(tmp_path):
    """The showers of the CLIC detector: the energy is the second column of target."""
    ecal, target = RNG.random((6, 25, 25, 25)), np.array([[11.0, energy] for energy in range(6)])
    path = write_h5(tmp_path / "ele.h5", ECAL=ecal, target=target)
    shower, energy = read(indexed(path, inputs="ECAL", targets="target[:, 1]"))
    assert shower.shape == (6, 25, 25, 25)
    np.testing.assert_array_equal(energy, np.arange(6))


def test_targets_of_nnlo_are_a_group(tmp_path):
    path = write_h5(tmp_path / "a.h5", X=X, y__a=Y, y__b=X[:, 0], y__c=X)
    index = indexed(path, inputs="X", targets="y")
    assert [(field.name, field.shape) for field in index.targets.members] == [
        ("a", ()), ("b", ()), ("c", (3,)),
    ]  # fmt: skip


def test_showers_of_the_calochallenge_are_read(tmp_path):
    """https://calochallenge.github.io/homepage: energies in MeV, (N, 1), and voxels, (N, V)."""
    showers, energies = RNG.random((8, 368)), 2.0 ** np.arange(8)[:, None]
    path = write_h5(tmp_path / "photons.hdf5", showers=showers, incident_energies=energies)
    _, condition = read(indexed(path, inputs="showers", targets="incident_energies"))
    np.testing.assert_array_equal(condition, energies)


def test_records_of_flavour_tagging_are_read_by_column(tmp_path):
    """Datasets of records, as of ATLAS: jets (N,) and tracks (N, 40)."""
    jets = np.zeros(9, [("pt", "f4"), ("flavour", "i4")])
    tracks = np.zeros((9, 40), [("d0", "f2"), ("z0", "f2")])
    jets["pt"], tracks["z0"] = np.arange(9), np.arange(9)[:, None]
    path = write_h5(tmp_path / "a.h5", 4, jets=jets, tracks=tracks)
    index = indexed(path, inputs=["jets/pt", "(tracks/d0, tracks/z0)"], targets="jets/flavour")
    pt, track, _ = read(index)
    np.testing.assert_array_equal(pt, np.arange(9))
    assert track.shape == (9, 40, 2)
    np.testing.assert_array_equal(track[:, 7, 1], np.arange(9))


def test_a_frame_of_pytables_is_told_how_to_be_read(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:  # as DataFrame.to_hdf(format="fixed") has it
        group = file.create_group("frame")
        group.attrs["pandas_type"] = np.bytes_("frame")
        group["block0_values"] = X
    message = refused(tmp_path / "a.h5", inputs="pt")
    assert message.endswith("pandas.read_hdf('a.h5').to_parquet('frame.parquet')")


def test_the_indices_that_pytables_keeps_are_no_arrays(tmp_path):
    path = write_h5(tmp_path / "a.h5", df___i_table__index__sorted=X, df__table=X)
    with open_file(str(path)) as file:
        assert file.names == ["df/table"]


# -- the number of the file ------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_number_of_its_file_is_a_field_of_each_event(tmp_path, ending):
    files = [
        write_columns(tmp_path / f"{name}.{ending}", rows)
        for name, rows in (("background", slice(0, 100)), ("signal", slice(100, None)))
    ]
    index = indexed(*files, inputs="(pt, @file)", targets="@file")
    stacked, number = read(index, np.arange(EVENTS)[::-1])
    expected = (np.arange(EVENTS) >= 100)[::-1]
    np.testing.assert_array_equal(number, expected)
    np.testing.assert_array_equal(stacked, np.stack([X[::-1, 0], expected], axis=1))
    assert number.dtype == np.int64


@pytest.mark.parametrize(("numbers", "dtype"), [([1.0, 0.0], np.int64), ([0.5, 2.0], np.float32)])
def test_a_study_says_which_number_a_file_has(tmp_path, numbers, dtype):
    files = [write_columns(tmp_path / name, slice(0, 2)) for name in ("a.h5", "b.h5")]
    _, found = read(indexed(*files, inputs="pt", targets="@file", file_numbers=numbers))
    np.testing.assert_array_equal(found, np.repeat(numbers, 2))
    assert found.dtype == dtype


@pytest.mark.parametrize("ending", ["h5", "npz", "root"])
@pytest.mark.parametrize(
    ("inputs", "targets"), [("x", "@file"), ("@file", "x"), ("(@file, x)", "@file")]
)
def test_a_number_is_as_long_as_the_other_fields_whatever_else_the_file_holds(
    tmp_path, ending, inputs, targets
):
    path, here = tmp_path / f"a.{ending}", {"x": X[:, 0]}
    other = {"mean": X[:3, 0], "width": X[:3, 1], "low": X[:3, 2]}
    if ending == "h5":
        write_h5(path, 4, **here, **other)
    elif ending == "npz":
        np.savez(path, **here, **other)
    else:
        with uproot.recreate(path) as file:
            file.mktree("a", {"x": "float32"})
            file["a"].extend(here)
            file.mktree("b", dict.fromkeys(other, "float32"))
            file["b"].extend(other)
        inputs, targets = (each.replace("x", "a/x") for each in (inputs, targets))
    index = indexed(path, inputs=inputs, targets=targets, file_numbers=[7])
    assert index.num_events == EVENTS
    of_field = {"@file": np.full(EVENTS, 7), "x": X[:, 0]}
    of_field["(@file, x)"] = np.stack([of_field["@file"], X[:, 0]], axis=1)
    for values, text in zip(read(index), (inputs, targets), strict=True):
        np.testing.assert_array_equal(values, of_field[text.replace("a/x", "x")])
    data = make_task([path], data={"inputs": inputs, "targets": targets}).data
    assert {each["events"] for each in datacheck.of_study(data)[0]["arrays"]} == {EVENTS}
    fields = [f"first={inputs}", f"second={targets}"]
    assert convert.main([str(path), "--to", str(tmp_path / "out.h5"), "--fields", *fields]) == 0
    with open_file(str(tmp_path / "out.h5")) as file:
        assert {len(file.find(name)) for name in ("first", "second")} == {EVENTS}


def test_a_number_opens_no_array_but_one(tmp_path, monkeypatch):
    path = write_h5(tmp_path / "a.h5", 4, x=X, **{f"b{number}": X for number in range(9)})
    opened = set()
    open_one = Hdf5._open
    monkeypatch.setattr(Hdf5, "_open", lambda file, name: opened.add(name) or open_one(file, name))
    read(indexed(path, inputs="x", targets="@file"))
    assert opened == {"x"}


def test_numbers_that_are_not_one_for_each_file_are_refused(tmp_path):
    path = write_columns(tmp_path / "a.h5")
    said = refused(path, inputs="pt", targets="@file", file_numbers=[0, 1])
    assert said == "data.file_numbers: 2 numbers are not one for each of 1 files"


# -- a format of the user's own --------------------------------------------------------------------

READERS = """\
import numpy as np


def lines(path):
    table = np.loadtxt(path, dtype="float32", comments="#")
    return {"x": table[:, :3], "y": table[:, 3].astype("int64")}


def broken(path):
    raise ValueError("no header")


def rows(path):
    return [1, 2]


def lists(path):
    return {"x": [1, 2]}


def ragged(path):
    return {"x": np.array([[1], [1, 2]] * 25, dtype=object), "y": np.zeros(50)}


def tensors(path):
    import torch

    return {"x": torch.zeros(3)}
"""


@pytest.fixture
def texts(tmp_path) -> tuple[Path, Path]:
    """The events in two files of text, and the file of the functions that read them."""
    table = np.column_stack([X, Y])
    for number, part in enumerate((table[:50], table[50:])):
        np.savetxt(tmp_path / f"{number}.txt", part, fmt="%.9g", header="pt eta phi y")
    (tmp_path / "readers.py").write_text(READERS)
    return tmp_path / "0.txt", tmp_path / "1.txt"


def own(texts, name: str) -> dict[str, str]:
    return {"inputs": "x", "targets": "y", "reader": f"{texts[0].parent / 'readers.py'}:{name}"}


def test_a_function_of_the_users_reads_other_formats(texts):
    index = indexed(*texts, **own(texts, "lines"))
    assert index.file_events == (50, 80)
    x, y = read(index)
    assert (x == X).all()
    assert (y == Y).all()
    x, y = read(indexed(*texts, **{**own(texts, "lines"), "inputs": "x[:, 1:]"}), np.array([60, 3]))
    assert (x == X[[60, 3], 1:]).all()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("broken", "'readers.py:broken' of '0.txt': ValueError: no header (readers.py line 10)"),
        ("rows", "'readers.py:rows' of '0.txt': gives a list, not a table of arrays by name"),
        ("lists", "'readers.py:lists' of '0.txt': 'x' is a list, not an array"),
        (
            "ragged",
            "0.txt: 'x' holds Python objects, such as arrays of different lengths, not "
            "numbers; pad them with zeros to one array, (events, most, ...)",
        ),
        ("tensors", "'readers.py:tensors' of '0.txt': 'x' is a Tensor, not an array"),
        (
            "other",
            "'readers.py:other': there is no 'other', only lines, broken, rows, lists, ragged",
        ),
    ],
)
def test_what_is_wrong_with_it_is_told_in_a_line(texts, name, said):
    assert said in refused(*texts, **own(texts, name))


def test_a_study_finds_it_beside_its_file_and_data_check_uses_it(edit, n3lo, texts, tmp_path):
    edit('files = ["events.h5"]', 'files = ["?.txt"]\nreader = "readers.py:lines"')
    model = tmp_path / "my_model.py"
    model.write_text(model.read_text().replace("(width, 2)", "(width, 3)"))
    path = tmp_path / "small.toml"
    checked = n3lo("data", "check", path)
    assert checked.returncode == 0, checked
    assert "0.txt: your own" in checked.stdout
    planned = n3lo("plan", path)
    assert planned.returncode == 0, planned
    assert f"data: {EVENTS} events" in planned.stdout
