"""What the trained generators are worth: their showers against Geant4's, in one table.

    python run_workflow.py studies/calorimeter_gan.toml       # on a machine with a GPU
    python run_workflow.py studies/calorimeter_flow.toml
    python benchmarks/calorimeter_physics.py run              # anywhere, from their run folders
    python benchmarks/calorimeter_physics.py table

`run` makes a shower of each energy in the second file of the data, and leaves tables and figures of
`apps.physics.validation`; those that the documentation shows go to docs/figures. Four fifths of
these showers were trained on: the generators' `val_shower_error` is of the others.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
REAL = Path("studies/data/clic_ecal_electrons_geant4_part2.h5")  # from ROOT
RESULTS = Path(__file__).parent / "results"
FIGURES = ROOT / "docs/figures"
SHOWN = ("longitudinal_profile", "transverse_profiles", "response_and_resolution", "cell_energies")
STUDIES = {"3DGAN": "calorimeter_gan", "flow": "calorimeter_flow"}


def run(folder: Path) -> None:
    for label, study in STUDIES.items():
        made, out = folder / f"{study}.h5", folder / study  # as `validation.json` names them
        if not (ROOT / made).exists():  # a flow takes ten minutes for them on two cores
            program = [sys.executable, ROOT / "run_workflow.py", "generate"]
            call([*program, ROOT / f"studies/{study}.toml", "--like", REAL, "--to", made])
        judge = [sys.executable, "-m", "apps.physics.validation", REAL, made, "--out", out]
        call([*judge, "--labels", "Geant4", label])
        shutil.copy(ROOT / out / "validation.json", result_of(study))
        FIGURES.mkdir(exist_ok=True)
        for name in SHOWN:
            shutil.copy(ROOT / out / f"{name}.png", FIGURES / f"{study}_{name}.png")


def call(words: list[Any]) -> None:
    subprocess.run([str(word) for word in words], cwd=ROOT, check=True)


def result_of(study: str) -> Path:
    return RESULTS / f"{study}_physics.json"


def table() -> None:
    rows = [
        {row["name"]: row for row in json.loads(result_of(study).read_text())["rows"]}
        for study in STUDIES.values()
    ]
    print(f"| | unit | {' | '.join(STUDIES)} | Geant4 against Geant4 |")
    print("|---|---|---|---|---|")
    for name, first in rows[0].items():
        values = [f"{each[name]['value']:.3g} ± {each[name]['uncertainty']:.1g}" for each in rows]
        floor = f"{first['floor']:.3g} ± {first['floor_uncertainty']:.1g}"
        print(f"| {name} | {first['unit'] or ''} | {' | '.join(values)} | {floor} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["run", "table"])
    parser.add_argument("--folder", type=Path, default=Path("runs/calorimeter_physics"))
    options = parser.parse_args()
    (ROOT / options.folder).mkdir(parents=True, exist_ok=True)
    if options.what == "run":
        run(options.folder)
    else:
        table()
