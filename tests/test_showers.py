"""What is odd about a user's showers is said in one line, before anything trains."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from training_helpers import ROOT, make_task, write_h5

from apps.check import check
from apps.contract import N3LOError, TrainTask
from apps.models.showers import ShowerModel
from apps.physics.observables import figure_of_merit, shower_sums

FILE = ROOT / "studies/data/clic_ecal_electrons_geant4_part1.h5"


@pytest.fixture(scope="module")
def real() -> dict[str, np.ndarray]:
    with h5py.File(FILE) as file:
        return {name: file[name][:40] for name in ("ECAL", "energy")}


def task_of(path: Path, **data: Any) -> TrainTask:
    args = {
        "generator": {"latent_size": 4, "filters": [2, 2, 2]},
        "discriminator": {"filters": [2, 2, 2, 2]},
    }
    return make_task(
        [path],
        model={"source": "apps.models.calorimeter_gan:CalorimeterGan", "args": args},
        data={"inputs": "ECAL", "targets": "energy", "folds": 2, **data},
        training={"loss": "own", "batch_size": 10, "optimizer": {"name": "adam"}},
        objective={"metric": "val_shower_error", "goal": "min"},
    )


def warnings_about(path: Path, **datasets: np.ndarray) -> list[str]:
    found = check(task_of(write_h5(path, **datasets)))["warnings"]
    return [line for line in found if line.startswith("data: ")]


def test_good_showers_are_taken_without_a_word(real, tmp_path):
    assert warnings_about(tmp_path / "good.h5", **real) == []


def test_energies_in_mev_are_told(real, tmp_path):
    (line,) = warnings_about(tmp_path / "mev.h5", ECAL=real["ECAL"], energy=1000 * real["energy"])
    assert re.fullmatch(r"data: energies look like MeV: the median response S/E is 2.*e-05", line)


def test_cells_in_mev_are_told(real, tmp_path):
    (line,) = warnings_about(tmp_path / "mev.h5", ECAL=1000 * real["ECAL"], energy=real["energy"])
    assert line.startswith("data: cells look like MeV")


def test_another_order_of_the_axes_is_told(real, tmp_path):
    turned = np.ascontiguousarray(real["ECAL"].transpose(0, 3, 1, 2))
    (line,) = warnings_about(tmp_path / "turned.h5", ECAL=turned, energy=real["energy"])
    assert line.startswith("data: axis x looks like the layers: the shower is 4.")
    assert line.endswith("axes must be (events, x, y, layers)")


def test_negative_cells_and_empty_showers_are_counted(real, tmp_path):
    cells = real["ECAL"].copy()
    cells[3], cells[5, 0, 0, :2] = 0.0, -0.001
    assert warnings_about(tmp_path / "odd.h5", ECAL=cells, energy=real["energy"]) == [
        "data: 2 cells are negative (lowest -0.001 GeV); taken as 0",
        "data: 1 of 40 showers deposit nothing",
    ]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda cells, energy: (cells, 0 * energy), "data: "),
        (lambda cells, energy: (cells * np.nan, energy), "data: "),
        (lambda cells, energy: (cells.reshape(40, -1), energy), "data: "),
    ],
    ids=["no energy", "nan", "a row of cells"],
)
def test_what_cannot_be_trained_on_ends_the_check(real, tmp_path, change, line):
    cells, energy = change(real["ECAL"], real["energy"])
    with pytest.raises(N3LOError, match=f"^{line}") as caught:
        check(task_of(write_h5(tmp_path / "bad.h5", ECAL=cells, energy=energy)))
    assert "\n" not in str(caught.value)


def test_a_missing_energy_names_what_is_there(real, tmp_path):
    file = write_h5(tmp_path / "no_energy.h5", ECAL=real["ECAL"], Energy=real["energy"])
    with pytest.raises(N3LOError, match="'energy'") as caught:
        check(task_of(file))
    assert "Energy" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_several_fields_are_none_of_a_shower(real, tmp_path):
    file = write_h5(tmp_path / "good.h5", **real)
    with pytest.raises(N3LOError, match=r"^data: a model of showers takes one field of cells and"):
        check(task_of(file, targets=["energy", "energy"]))


class Scaled(ShowerModel):
    """Gives the real showers back, a little stronger."""

    def __init__(self, showers: torch.Tensor, factor: float) -> None:
        self.made = factor * showers

    def generate(self, energies: torch.Tensor) -> torch.Tensor:
        return self.made[: len(energies)]


def test_the_verdict_over_batches_is_that_of_all_showers(real):
    showers, energies = torch.from_numpy(real["ECAL"]), torch.from_numpy(real["energy"])
    parts = [slice(0, 7), slice(7, 40)]
    total = sum(Scaled(showers[part], 1.1).judge(showers[part], energies[part]) for part in parts)
    model = Scaled(showers, 1.1)
    assert len(total) == model.judged
    found = model.verdict(total)
    sums = [
        shower_sums(cells, real["energy"], model.energy_edges)
        for cells in (real["ECAL"], np.float32(1.1) * real["ECAL"])
    ]
    expected = figure_of_merit(*sums)
    assert found == pytest.approx(
        {
            "shower_error": expected.total,
            "moment_error": expected.moments,
            "profile_error": expected.profiles,
        }
    )
    assert found["profile_error"] == pytest.approx(0.1, rel=1e-3)  # each cell is 10 % stronger
    assert found["moment_error"] == pytest.approx(0.0, abs=1e-3)
