"""The parametric showers: their formulas, how near they come to Geant4, and their files.

Showers from Geant4 are the 2000 of studies/data; the parametric ones have the same energies.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tracemalloc
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

import h5py
import numpy as np
import pytest
from scipy.integrate import quad
from scipy.special import gamma
from scipy.stats import kstest

from apps.contract import Data, N3LOError
from apps.hdf5 import index_files
from apps.physics.parametric import (
    BLOCK_EVENTS,
    CLIC,
    generate,
    layer_energies,
    main,
    radial_profile,
    scatter,
    write,
)

ROOT = Path(__file__).resolve().parent.parent
GEANT4 = [ROOT / f"studies/data/clic_ecal_electrons_geant4_part{part}.h5" for part in (1, 2)]
ENERGY_EDGES = (10, 30, 60, 100)  # GeV
BACK_TWICE = np.where(np.arange(25) < 17, 1, 2)  # the absorbers of the last 8 layers are double
STILL = replace(CLIC, sigma_maximum=(1e9, 0.0), sigma_shape=0.0)  # no shower is like no other


def observables(showers, energies):
    """(N,) each, of showers (N, x, y, layer); and the layers' energies (N, 25)."""
    layers, rows = showers.sum((1, 2), np.float64), showers.sum((2, 3), np.float64)
    total, cells = layers.sum(1), np.arange(25)
    depth, x = layers @ cells / total, rows @ cells / total
    return {
        "layers": layers,
        "response": total / energies,
        "weighted": layers @ BACK_TWICE / energies,
        "depth": depth,
        "depth_rms": np.sqrt(layers @ cells**2 / total - depth**2),
        "x": x,
        "x_rms": np.sqrt(rows @ cells**2 / total - x**2),
        "hits": (showers > 1e-6).sum((1, 2, 3)),
        "hottest": showers.max((1, 2, 3)) / total,
        "spectrum": np.log10(showers[showers > 1e-6]),
    }


@pytest.fixture(scope="module")
def energies():
    return np.concatenate([h5py.File(path)["energy"][:] for path in GEANT4]).astype(np.float64)


@pytest.fixture(scope="module")
def geant4(energies):
    return observables(np.concatenate([h5py.File(path)["ECAL"][:] for path in GEANT4]), energies)


@pytest.fixture(scope="module")
def parametric(energies):
    return observables(generate(energies, seed=1), energies)


def separation(first, second, edges):
    """1/2 sum (p - q)^2 / (p + q) of normalised histograms (arXiv:2009.03796, equation 15)."""
    p, q = (np.histogram(each, edges)[0] / len(each) for each in (first, second))
    filled = p + q > 0
    return 0.5 * np.sum((p - q)[filled] ** 2 / (p + q)[filled])


# Formulas


@pytest.mark.parametrize("energy", [10.0, 50.0, 100.0])
def test_a_layer_sees_the_mean_of_the_gamma_distribution_around_its_silicon(energy):
    calorimeter = replace(CLIC, track_gev=0.0)
    seen, tau = layer_energies(np.array([energy]), np.zeros((1, 2)), calorimeter)
    log_y = np.log(energy / 8e-3)
    maximum, alpha = log_y - 0.10, 2.667 + 0.375 * log_y
    beta = (alpha - 1) / maximum

    def longo_sestili(t):
        return energy * beta * (beta * t) ** (alpha - 1) * np.exp(-beta * t) / gamma(alpha)

    edges = np.cumsum([0.6, *CLIC.layer_x0])  # the gamma distribution begins 0.6 X0 before
    for layer in (0, 5, 16, 17, 24):
        thickness, silicon = CLIC.layer_x0[layer], edges[layer + 1]
        mean = quad(longo_sestili, silicon - thickness / 2, silicon + thickness / 2)[0] / thickness
        assert seen[0, layer] == pytest.approx(0.02465 * 0.6484 * mean, rel=1e-6)
        assert tau[0, layer] == pytest.approx(silicon / maximum)


def test_the_depth_of_the_maximum_fluctuates_as_a_log_normal_variable():
    normal = np.random.default_rng(0).standard_normal((20_000, 2))
    _, tau = layer_energies(np.full(20_000, 50.0), normal)
    log_maximum = np.log((0.6 + CLIC.layer_x0[0]) / tau[:, 0])
    log_y = np.log(50 / 8e-3)
    assert log_maximum.mean() == pytest.approx(np.log(log_y - 0.10), abs=0.003)
    assert log_maximum.std() == pytest.approx(1 / (-2.4 + 1.4 * log_y), rel=0.02)


def test_the_electron_leaves_its_track_in_the_first_layers():
    with_track, _ = layer_energies(np.array([20.0]), np.zeros((1, 2)))
    without, _ = layer_energies(np.array([20.0]), np.zeros((1, 2)), replace(CLIC, track_gev=0.0))
    depth = np.cumsum([0, *CLIC.layer_x0[:-1]])
    np.testing.assert_allclose((with_track - without)[0], 0.4e-3 * np.exp(-depth / 3), rtol=1e-6)


def test_the_core_widens_with_depth_and_the_tail_is_narrowest_before_the_maximum():
    tau = np.linspace(0.1, 2.5, 49)[None]
    shares, radii = radial_profile(np.array([50.0]), tau)
    np.testing.assert_allclose(shares.sum(-1), 1)
    assert (shares >= 0).all()
    core, tail = radii[0, :, 0], radii[0, :, 1]
    np.testing.assert_allclose(np.diff(core) / np.diff(tau[0]), 0.109)
    assert 0.645 < tau[0, tail.argmin()] < 2
    assert (tail > core).all()


def test_the_tail_at_its_fixed_point_is_twice_k1_at_every_energy():
    _, radii = radial_profile(np.array([10.0, 100.0]), np.full((2, 1), 0.645))
    np.testing.assert_allclose(radii[:, 0, 1], 2 * 0.4145)


def test_distances_from_the_axis_follow_the_radial_profile():
    x, y = scatter(np.full(20_000, 3.0, np.float32), np.random.default_rng(1))
    assert kstest(np.hypot(x, y), lambda r: r**2 / (r**2 + 9)).pvalue > 0.01
    assert kstest(x, lambda x: (1 + x / np.sqrt(x**2 + 9)) / 2).pvalue > 0.01  # integrated over y
    assert kstest(y, lambda y: (1 + y / np.sqrt(y**2 + 9)) / 2).pvalue > 0.01


def test_the_sampling_fluctuation_is_that_of_a_poisson_number_of_spots():
    """Variance of a compound Poisson sum: number of spots x mean square of a spot."""
    totals = generate(np.full(1500, 20.0), 2, STILL).sum((1, 2, 3), np.float64)
    spot, shape = CLIC.spot_gev, CLIC.spot_shape
    variance = totals.mean() / spot * spot**2 * (1 + 1 / shape)
    assert totals.var() == pytest.approx(variance, rel=0.12)  # 3 sigma of 1500 events


def test_all_but_a_hundredth_of_the_energy_is_inside_the_cells():
    expected, _ = layer_energies(np.full(1, 50.0), np.zeros((1, 2)), STILL)
    seen = generate(np.full(500, 50.0), 3, STILL).sum((1, 2, 3), np.float64).mean()
    assert 0.985 < seen / expected.sum() < 0.999


def test_a_wider_calorimeter_sees_the_same_showers_with_more_of_their_tails():
    wide = generate(np.full(50, 50.0), 4, replace(CLIC, num_cells=51))
    assert wide.shape == (50, 51, 51, 25)
    inner, narrow = wide[:, 13:38, 13:38], generate(np.full(50, 50.0), 4)
    np.testing.assert_allclose(inner.sum((1, 2)), narrow.sum((1, 2)), rtol=1e-3)
    assert inner.sum() < wide.sum() < 1.01 * inner.sum()


# Against Geant4


def test_the_mean_response_is_that_of_geant4(geant4, parametric):
    assert parametric["response"].mean() == pytest.approx(geant4["response"].mean(), rel=0.01)


@pytest.mark.parametrize(("low", "high"), list(pairwise(ENERGY_EDGES)))
def test_the_energy_resolution_is_that_of_geant4(geant4, parametric, energies, low, high):
    chosen = (energies >= low) & (energies < high)
    ours, theirs = (each["weighted"][chosen] for each in (parametric, geant4))
    resolution = theirs.std() / theirs.mean()
    assert ours.std() / ours.mean() == pytest.approx(resolution, rel=0.15)


def test_depth_and_width_are_those_of_geant4(geant4, parametric):
    assert parametric["depth"].mean() == pytest.approx(geant4["depth"].mean(), abs=0.1)
    assert parametric["depth"].std() == pytest.approx(geant4["depth"].std(), rel=0.05)
    assert parametric["depth_rms"].mean() == pytest.approx(geant4["depth_rms"].mean(), rel=0.01)
    assert parametric["x"].mean() == pytest.approx(12, abs=0.02)
    assert parametric["x"].std() == pytest.approx(geant4["x"].std(), rel=0.06)
    assert parametric["x_rms"].mean() == pytest.approx(geant4["x_rms"].mean(), rel=0.03)


def test_the_layer_profile_is_that_of_geant4(geant4, parametric):
    ratio = parametric["layers"].mean(0) / geant4["layers"].mean(0)
    np.testing.assert_allclose(ratio[:2], 1, atol=0.1)
    np.testing.assert_allclose(ratio[2:], 1, atol=0.06)


@pytest.mark.parametrize(("low", "high"), list(pairwise(ENERGY_EDGES)))
def test_the_number_of_hits_is_that_of_geant4(geant4, parametric, energies, low, high):
    chosen = (energies >= low) & (energies < high)
    theirs = geant4["hits"][chosen].mean()
    assert parametric["hits"][chosen].mean() == pytest.approx(theirs, rel=0.04)


def test_the_hottest_cell_holds_as_much_as_in_geant4(geant4, parametric):
    assert parametric["hottest"].mean() == pytest.approx(geant4["hottest"].mean(), rel=0.05)


@pytest.mark.parametrize(
    ("name", "bins", "bound"),
    [
        ("response", np.linspace(0.016, 0.026, 31), 0.03),
        ("depth", np.linspace(8, 16, 31), 0.02),
        ("x_rms", np.linspace(1.1, 1.9, 31), 0.03),
        ("hits", np.linspace(200, 1200, 31), 0.02),
        ("spectrum", np.linspace(-6, -0.5, 31), 0.012),
    ],
)
def test_distributions_are_hardly_separated_from_those_of_geant4(
    geant4, parametric, name, bins, bound
):
    """Two samples of 2000 from one distribution are 30 / 4000 = 0.0075 apart in 31 bins."""
    assert separation(parametric[name], geant4[name], bins) < bound


# Reproducibility and limits


def test_a_seed_gives_the_same_showers_again_and_another_seed_gives_others():
    energies = np.linspace(10, 100, 30)
    first = generate(energies, 5)
    np.testing.assert_array_equal(first, generate(energies, 5))
    assert (first != generate(energies, 6)).any(axis=(1, 2, 3)).all()


def test_blocks_do_not_depend_on_how_many_follow():
    energies = np.linspace(10, 100, 3 * BLOCK_EVENTS)
    longer = generate(energies, 7)
    np.testing.assert_array_equal(
        longer[: 2 * BLOCK_EVENTS], generate(energies[: 2 * BLOCK_EVENTS], 7)
    )
    assert len(np.unique(longer.sum((1, 2, 3)))) == len(energies)


def test_the_read_out_is_that_of_the_geant4_files():
    showers = generate(np.full(50, 30.0), 8)
    assert showers.dtype == np.float32
    assert showers.shape == (50, 25, 25, 25)
    assert showers[showers > 0].min() >= 1e-6 * (1 - 2**-11)
    assert not (showers.view(np.uint32) & 0x1FFF).any()  # 13 of 23 mantissa bits are zero


def test_no_events_are_no_showers():
    assert generate(np.empty(0), 1).shape == (0, 25, 25, 25)


@pytest.mark.parametrize("energy", [0.0, 4.9, 501.0, np.nan, np.inf, -20.0])
def test_an_energy_that_the_formulas_do_not_hold_for_is_refused(energy):
    with pytest.raises(N3LOError, match=r"energy: .* GeV is outside .* 5 to 500 GeV"):
        generate(np.array([20.0, energy]), 1)


def test_memory_beyond_the_showers_is_that_of_one_block():
    tracemalloc.start()
    showers = generate(np.full(400, 100.0), 9)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak - showers.nbytes < 60e6


# Files


@pytest.fixture
def written(tmp_path):
    path = tmp_path / "showers.h5"
    write(path, 130, (10, 100), seed=1)
    return path


def read(path):
    with h5py.File(path) as file:
        return {name: dataset[:] for name, dataset in file.items()}


def test_a_file_has_the_layout_of_the_geant4_files(written):
    with h5py.File(written) as ours, h5py.File(GEANT4[0]) as theirs:
        assert set(ours) == set(theirs)
        for name, dataset in theirs.items():
            assert ours[name].dtype == dataset.dtype
            assert ours[name].shape == (130, *dataset.shape[1:])
            assert dict(ours[name].attrs) == dict(dataset.attrs)
        for fact in ("chunks", "compression", "shuffle"):
            assert getattr(ours["ECAL"], fact) == getattr(theirs["ECAL"], fact)
        assert set(theirs.attrs) <= set(ours.attrs)


def test_columns_mean_what_they_mean_in_the_geant4_files(written):
    for path in (written, GEANT4[0]):
        data = read(path)
        np.testing.assert_array_equal(data["target"][:, 0], data["pdgID"])
        np.testing.assert_array_equal(data["target"][:, 1], data["energy"])
        np.testing.assert_allclose(data["ECAL_E"], data["ECAL"].sum((1, 2, 3)), rtol=1e-3)
        np.testing.assert_allclose(data["theta"], np.pi / 2, rtol=1e-6)
        assert (np.abs(data["vertex_xy"]) <= 2.55).all()
        x = data["ECAL"].sum((2, 3)) @ np.arange(25) / data["ECAL"].sum((1, 2, 3))
        y = data["ECAL"].sum((1, 3)) @ np.arange(25) / data["ECAL"].sum((1, 2, 3))
        assert np.corrcoef(x, data["vertex_xy"][:, 0])[0, 1] > 0.9
        assert np.corrcoef(y, data["vertex_xy"][:, 1])[0, 1] > 0.9


def test_a_file_says_that_it_is_parametric_and_how_it_was_made(written):
    with h5py.File(written) as file:
        assert file.attrs["kind"] == "parametric"
        assert "never Geant4" in file.attrs["simulation"]
        assert json.loads(file.attrs["constants"]) == json.loads(json.dumps(asdict(CLIC)))
        assert (file.attrs["seed"], file.attrs["first_event"]) == (1, 0)
        assert list(file.attrs["energy_range_gev"]) == [10, 100]


def test_the_showers_of_a_file_are_those_of_its_energies_and_seed(written):
    data = read(written)
    whole = slice(0, 2 * BLOCK_EVENTS)
    np.testing.assert_array_equal(data["ECAL"][whole], generate(data["energy"][whole], seed=1))
    assert data["energy"].min() >= 10
    assert data["energy"].max() <= 100
    assert kstest(data["energy"], "uniform", (10, 90)).pvalue > 0.01


def test_parts_hold_the_same_events_as_one_file(written, tmp_path):
    write(tmp_path / "part0.h5", 70, (10, 100), seed=1)
    write(tmp_path / "part1.h5", 60, (10, 100), seed=1, first_event=70)
    first, second = read(tmp_path / "part0.h5"), read(tmp_path / "part1.h5")
    for name, values in read(written).items():
        np.testing.assert_array_equal(values, np.concatenate([first[name], second[name]]))


def test_writing_again_gives_the_same_bytes(written, tmp_path):
    write(tmp_path / "again.h5", 130, (10, 100), seed=1)
    assert (tmp_path / "again.h5").read_bytes() == written.read_bytes()


def test_a_training_can_read_a_file(written):
    index = index_files(Data(files=[str(written)], inputs="ECAL", targets="target[:, 1]"))
    assert index.num_events == 130
    assert index.inputs.members[0].shape == (25, 25, 25)


def test_an_interrupted_file_leaves_nothing(tmp_path):
    def interrupt(written):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "showers.h5", 100, (10, 100), seed=1, progress=interrupt)
    assert not list(tmp_path.iterdir())


# The command


def words(path, **changes):
    options = {"events": 20, "energy": (10, 20), "seed": 1, **changes}
    text = [str(path)]
    for name, value in options.items():
        text += [f"--{name.replace('_', '-')}", *map(str, np.atleast_1d(value))]
    return text


def test_the_command_writes_a_file_and_says_nothing_without_a_terminal(tmp_path, capsys):
    assert main(words(tmp_path / "showers.h5", first_event=7)) == 0
    assert len(read(tmp_path / "showers.h5")["energy"]) == 20
    assert capsys.readouterr() == ("", "")


def test_progress_is_shown_on_a_terminal(tmp_path, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    main(words(tmp_path / "showers.h5", events=70))
    assert "\r50 of 70 events" in terminal.getvalue()
    assert terminal.getvalue().endswith("events/s\n")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"events": 0}, "events: 0 is not at least 1"),
        ({"events": 2.5}, "argument --events: invalid int value: '2.5'"),
        ({"energy": (1, 20)}, "energy: 1 GeV is outside the formulas' range, 5 to 500 GeV"),
        ({"energy": (20, 10)}, "energy: the range 20-10 GeV is reversed"),
        ({"energy": (10,)}, "argument --energy: expected 2 arguments"),
        ({"seed": -1}, "seed: -1 is negative"),
        ({"first_event": -50}, "first event: -50 is negative"),
    ],
)
def test_bad_arguments_give_one_line_and_status_2(tmp_path, capsys, changes, message):
    assert main(words(tmp_path / "showers.h5", **changes)) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert message in lines[0]
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_there_gives_one_line_and_status_2(tmp_path, capsys):
    assert main(words(tmp_path / "nowhere" / "showers.h5")) == 2
    assert "showers.h5' cannot be written: No such file or directory" in capsys.readouterr().err


def test_an_existing_file_is_replaced_only_where_asked(tmp_path, capsys):
    path = tmp_path / "showers.h5"
    path.write_text("precious")
    assert main(words(path)) == 2
    assert "exists; give another name, or --overwrite" in capsys.readouterr().err
    assert path.read_text() == "precious"
    assert main([*words(path), "--overwrite"]) == 0
    assert len(read(path)["energy"]) == 20


@pytest.mark.parametrize("room", [1_000, 300_000])
def test_a_full_disk_gives_one_line_and_leaves_the_old_file(tmp_path, room):
    """HDF5 by itself crashes at exit; a limit on file sizes stands for the full disk."""
    path = tmp_path / "showers.h5"
    path.write_text("precious")
    code = (
        "import resource, sys; from apps.physics.parametric import main;"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({room}, {room})); sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, *words(path, events=200), "--overwrite"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [f"parametric: '{path}' cannot be written: File too large"]
    assert path.read_text() == "precious"
    assert list(tmp_path.iterdir()) == [path]
