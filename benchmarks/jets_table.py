"""Train a grid of jet taggers once, for search_quality.py to look up: results/jets_table.json.

    python benchmarks/jets_table.py        # about 20 minutes on one core

Every point of the grid is trained on three folds with two seeds, by the training program itself
(one rank, `local`), on the jets that ship with the project. Curves are 1 - validation accuracy
after each epoch, (seeds, folds, epochs). Started again, it goes on.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import tempfile
from pathlib import Path

from mpi4py import MPI  # noqa: F401  before torch, as in apps.train

# isort: split
from apps.contract import (
    Data,
    Fingerprint,
    Layout,
    Model,
    Objective,
    TaskPaths,
    Training,
    TrainTask,
    read_json_lines,
    write_text,
)
from apps.history import Diverged
from apps.train import train

HERE = Path(__file__).resolve().parent
TABLE = HERE / "results" / "jets_table.json"
JETS = HERE.parent / "studies" / "data" / "lhc_jets_pythia8_2000x100x16.h5"
AXES = {
    "lr": [1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1],
    "width": [8, 16, 32, 64, 128, 256],
    "depth": [1, 2, 3],
    "activation": ["relu", "gelu", "selu"],
}
SEEDS, FOLDS, EPOCHS = 2, 3, 12
CHANCE = 0.8  # the error of guessing; counts where a training diverged


def task(values: dict, seed: int, fold: int) -> TrainTask:
    width = values["width"]
    widths = {f"width_{layer}": width for layer in (1, 2, 3)}
    return TrainTask(
        study="table", trial=0, fold=fold, seed=1000 * seed + fold, split_seed=1,
        model=Model(
            source="apps.models.jets:JetMlp",
            args={**widths, "depth": values["depth"], "activation": values["activation"]},
        ),
        data=Data(files=[str(JETS)], inputs="jetConstituentList", targets="jets[:, -6:-1]",
                  folds=FOLDS),
        training=Training(epochs=EPOCHS, batch_size=64, metrics=["accuracy"], select="last",
                          optimizer={"name": "adam", "lr": values["lr"]}),
        layout=Layout(),
        objective=Objective(metric="val_accuracy", goal="max"),
        fingerprint=Fingerprint(data="", model="", code=""),
    )  # fmt: skip


def curve(values: dict, seed: int, fold: int) -> list[float]:
    """The error after each epoch, (EPOCHS,)."""
    folder = Path(tempfile.mkdtemp(prefix="n3lo-table-"))
    try:
        with contextlib.suppress(Diverged):
            train(task(values, seed, fold), TaskPaths(folder))
        rows = read_json_lines(TaskPaths(folder).history)
        errors = [round(1 - row["val_accuracy"], 6) for row in rows]
        return errors + [CHANCE] * (EPOCHS - len(errors))
    finally:
        shutil.rmtree(folder)


def main() -> None:
    rows = json.loads(TABLE.read_text())["rows"] if TABLE.exists() else []
    known = [row["point"] for row in rows]
    for places in itertools.product(*(range(len(axis)) for axis in AXES.values())):
        values = {name: AXES[name][place] for name, place in zip(AXES, places, strict=True)}
        point = dict(zip(AXES, places, strict=True)) | {"activation": values["activation"]}
        if point in known:
            continue
        curves = [[curve(values, seed, fold) for fold in range(FOLDS)] for seed in range(SEEDS)]
        rows.append({"point": point, "curves": curves})
        write_text(TABLE, json.dumps({"axes": AXES, "rows": rows}))
        print(values, curves[0][0][-1], flush=True)


if __name__ == "__main__":
    main()
