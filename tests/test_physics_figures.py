"""The command that validates a generator: its tables and figures, and what it refuses."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import h5py
import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure

from apps.physics.figures import FIGURES, STYLE, Curve, Pair, draw_all
from apps.physics.observables import Observables, layer_correlation, observe
from apps.physics.validation import main

DATA = Path(__file__).resolve().parent.parent / "studies" / "data"
EDGES = (10.0, 60.0, 100.0)


def geant4(number: int, events: int = 120) -> tuple[np.ndarray, np.ndarray]:
    with h5py.File(DATA / f"clic_ecal_electrons_geant4_part{number}.h5") as file:
        return file["ECAL"][:events], file["energy"][:events]


@pytest.fixture(scope="module")
def pair() -> Pair:
    real, fake = (observe(*geant4(number)) for number in (1, 2))
    return Pair(real=real, fake=fake, labels=("Geant4", "ours"), edges=EDGES)


@pytest.fixture(scope="module")
def drawn(pair) -> dict[str, Figure]:
    with matplotlib.rc_context(STYLE):
        return {name: draw(pair) for name, draw in FIGURES.items()}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """An HDF5 file of the given datasets."""

    def write(name: str, **datasets: np.ndarray) -> Path:
        with h5py.File(tmp_path / name, "w") as file:
            file.update(datasets)
        return tmp_path / name

    return write


def texts(figure: Figure) -> set[str]:
    return {
        text.get_text()
        for axis in figure.axes
        for text in (axis.xaxis.label, axis.yaxis.label, axis.title)
    }


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer halves and one figure: each takes a second to write."""
    monkeypatch.setattr("apps.physics.validation.HALVES", 2)
    monkeypatch.setattr("apps.physics.figures.FIGURES", {"hits": FIGURES["hits"]})


# Figures


def test_every_figure_can_be_rendered(drawn):
    for figure in drawn.values():
        figure.set_layout_engine("none")
        figure.savefig(io.BytesIO(), dpi=20)


def test_every_axis_says_its_quantity_and_unit(drawn):
    assert {"mean energy per layer [GeV]", "layer", "10 to 60 GeV"} <= texts(
        drawn["longitudinal_profile"]
    )
    assert {"mean energy [GeV]", "x cell (5.1 mm)"} <= texts(drawn["transverse_profiles"])
    assert "particle energy $E$ [GeV]" in texts(drawn["response_and_resolution"])
    assert "cell energy [GeV]" in texts(drawn["cell_energies"])
    assert "cells above 1 keV" in texts(drawn["hits"])
    assert "mean rms of a layer along x [mm]" in texts(drawn["layer_widths"])


def test_the_drawn_profile_is_the_mean_of_the_showers(pair, drawn):
    stairs = drawn["transverse_profiles"].axes[0].patches[0].get_data()
    np.testing.assert_allclose(stairs.values, pair.real.profiles[0].mean(axis=0))
    assert stairs.edges[[0, -1]].tolist() == [-0.5, 24.5]


def test_profiles_are_also_drawn_on_a_logarithmic_axis(drawn):
    assert [axis.get_yscale() for axis in drawn["transverse_profiles"].axes[::2]] == [
        "linear",
        "log",
        "linear",
    ]


def test_the_correlations_are_shown_with_their_difference(pair, drawn):
    shown = [axis.images[0].get_array() for axis in drawn["layer_correlations"].axes[:3]]
    np.testing.assert_allclose(shown[2], shown[1] - shown[0])
    np.testing.assert_allclose(shown[0], layer_correlation(pair.real.layers))


def test_the_real_and_the_generated_showers_are_named(drawn):
    for name in set(FIGURES) - {"layer_correlations"}:
        legends = [axis.get_legend() for axis in drawn[name].axes if axis.get_legend()]
        words = [text.get_text() for legend in legends for text in legend.get_texts()]
        assert any("Geant4" in word for word in words), name
        assert any("ours" in word for word in words), name


def test_a_ratio_has_the_error_of_its_numerator_and_none_over_nothing():
    over = Curve(np.array([2.0, 1.0]), np.array([0.2, 0.1])).over(
        Curve(np.array([4.0, 0.0]), np.array([1.0, 1.0]))
    )
    np.testing.assert_allclose(over.value, [0.5, np.nan])
    np.testing.assert_allclose(over.error, [0.05, np.nan])


def test_a_generator_of_nothing_can_be_drawn(pair):
    nothing: Observables = observe(np.zeros((3, 25, 25, 25)), np.array([20.0, 30.0, 70.0]))
    with matplotlib.rc_context(STYLE):
        for draw in FIGURES.values():
            draw(Pair(real=pair.real, fake=nothing, labels=pair.labels, edges=EDGES))


def test_drawing_leaves_the_style_of_others_and_repeats_to_the_byte(pair, tmp_path, quick):
    before = dict(matplotlib.rcParams)
    written = draw_all(pair.real, pair.fake, tmp_path / "new" / "folder", pair.labels, EDGES)
    assert dict(matplotlib.rcParams) == before
    assert [path.name for path in written] == ["hits.png", "hits.pdf"]
    again = draw_all(pair.real, pair.fake, tmp_path / "again", pair.labels, EDGES)
    assert [path.read_bytes() for path in written] == [path.read_bytes() for path in again]


# The command


def test_the_command_writes_tables_and_figures(write, tmp_path, capsys, quick):
    cells, energies = geant4(1)
    real = write("real.h5", ECAL=cells, target=np.column_stack([0 * energies, energies]))
    cells, energies = geant4(2)
    cells[7] = 0
    fake = write("fake.h5", ECAL=cells, target=np.column_stack([0 * energies, energies]))
    out = tmp_path / "made" / "here"
    main([str(real), str(fake), "--out", str(out), "--energies", "target[:, 1]"])

    facts = json.loads((out / "validation.json").read_text())
    assert facts["events_compared"] == 60
    assert facts["warnings"] == ["fake.h5: 1 of 120 showers deposit nothing"]
    names = [row["name"] for row in facts["rows"]]
    assert len(set(names)) == len(names)
    assert {"figure of merit of 3DGAN", "KPD", "FPD, N = 60", "classifier AUC"} <= set(names)
    table = (out / "validation.md").read_text()
    assert all(f"| {name} |" in table for name in names)
    assert (out / "hits.png").stat().st_size > 10_000
    assert (out / "hits.pdf").read_bytes().startswith(b"%PDF")
    said = capsys.readouterr()
    assert said.out == table
    assert said.err == "n3lo: warning: fake.h5: 1 of 120 showers deposit nothing\n"


def refused(words: list[object], capsys) -> str:
    """The one line that the command ends with."""
    with pytest.raises(SystemExit) as end:
        main([str(word) for word in words])
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert line.startswith("n3lo: ")
    return line


def test_a_file_that_cannot_be_used_is_one_line(write, tmp_path, capsys):
    good = DATA / "clic_ecal_electrons_geant4_part1.h5"
    cells, energies = geant4(1)
    out = ["--out", tmp_path / "out", "--events", 120]
    assert "nowhere.h5: does not exist" in refused([tmp_path / "nowhere.h5", good, *out], capsys)

    text = tmp_path / "text.h5"
    text.write_text("no HDF5")
    assert "is not a readable HDF5 file" in refused([good, text, *out], capsys)

    other = write("other.h5", showers=cells, energy=energies)
    assert "no dataset 'ECAL', only energy, showers" in refused([good, other, *out], capsys)

    cells[3, 12, 12, 12] = np.nan
    odd = write("odd.h5", ECAL=cells, energy=energies)
    assert "odd.h5: 1 cells are not finite" in refused([good, odd, *out], capsys)

    few = write("few.h5", ECAL=geant4(1, 20)[0], energy=energies[:20])
    assert "at least 100 of each" in refused([good, few, *out], capsys)
    assert not (tmp_path / "out").exists()


def test_options_that_cannot_be_are_one_line(tmp_path, capsys):
    good = DATA / "clic_ecal_electrons_geant4_part1.h5"
    words = [good, good, "--out", tmp_path / "out"]
    assert "100 10 do not rise" in refused([*words, "--edges", 100, 10], capsys)
    assert "'energy[:, 1]' does not fit (1000,)" in refused(
        [*words, "--energies", "energy[:, 1]"], capsys
    )
    assert "no energy bin holds both" in refused(
        [*words, "--events", 120, "--edges", 200, 500], capsys
    )
    assert "--events: 0 is not at least 1" in refused([*words, "--events", 0], capsys)


def test_unlike_energies_are_said(write, tmp_path, capsys):
    cells, energies = geant4(1, 200)
    order = np.argsort(energies)
    real, fake = (
        write(f"{name}.h5", ECAL=cells[some], energy=energies[some])
        for name, some in (("low", order[:110]), ("high", order[90:]))
    )
    with pytest.raises(SystemExit):
        main([str(real), str(fake), "--out", str(tmp_path / "out"), "--edges", "200", "300"])
    assert "not of one distribution" in capsys.readouterr().err


def test_the_checks_of_training_need_no_matplotlib_sklearn_or_scipy_stats():
    code = (
        "import sys; from apps.physics.validation import check_showers;"
        "from apps.physics.observables import shower_sums;"
        "assert not {'matplotlib', 'sklearn', 'scipy.stats'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
