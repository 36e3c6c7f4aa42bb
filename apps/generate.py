"""Write showers that a trained generator makes, in the layout of the files that it learned from.

python -P -m apps.generate TASK_FOLDER OUT.h5 --events 10000 --energy 10 100 --seed 1
python -P -m apps.generate TASK_FOLDER OUT.h5 --like showers.h5 --seed 1
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import h5py
import numpy as np
import torch

from apps.adversarial import Adversarial
from apps.contract import VERSION, N3LOError, TrainTask
from apps.experiment import Experiment
from apps.hdf5 import parse_field
from apps.models.showers import ShowerModel
from apps.new_h5 import new_h5
from apps.trained import load_trained, this_device

CHUNK = 50  # showers of a chunk, as in the files of Geant4
BATCH = 200  # showers made at once; each batch has random numbers of its own


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="apps.generate", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="TASK_FOLDER")
    parser.add_argument("out", type=Path, metavar="OUT.h5")
    parser.add_argument("--events", type=int, default=1000)
    parser.add_argument("--energy", type=float, nargs=2, default=(10.0, 100.0), metavar="GEV")
    parser.add_argument("--like", type=Path, metavar="FILE.h5")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(words)
    try:
        task, experiment = load_trained(options.folder, this_device())
        energies = energies_of(task, options)
        write(options.out, task, shower_model(task, experiment), energies, options.seed)
    except N3LOError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def energies_of(task: TrainTask, options: argparse.Namespace) -> np.ndarray:
    """Those of another file, or uniform ones; (N,) in GeV."""
    if options.like is not None:
        field = parse_field(task.data.targets)
        try:
            with h5py.File(options.like) as file:
                values = file[field.dataset][(slice(None), *field.index)]
        except (OSError, KeyError) as error:
            raise N3LOError(f"'{options.like}': '{field.text}' cannot be read: {error}") from error
        return np.asarray(values, np.float32)
    low, high = options.energy
    if options.events < 1:
        raise N3LOError(f"--events {options.events}: is not at least 1")
    if not 0 < low <= high:
        raise N3LOError(f"--energy {low:g} {high:g}: give the lower one first, above 0, in GeV")
    rng = np.random.default_rng(options.seed)
    return rng.uniform(low, high, options.events).astype(np.float32)


def shower_model(task: TrainTask, experiment: Experiment) -> ShowerModel:
    adversaries = experiment.adversaries if isinstance(experiment, Adversarial) else None
    if not isinstance(adversaries, ShowerModel):
        raise N3LOError(
            f"model '{task.model.source.rpartition(':')[2]}' makes no showers: it is not derived "
            "from apps.models.showers.ShowerModel"
        )
    if task.data.transforms:
        raise N3LOError(
            "data.transforms: this generator makes transformed showers, and nothing undoes that; "
            "train it on showers as they are, in GeV"
        )
    return adversaries


def write(path: Path, task: TrainTask, model: ShowerModel, energies: np.ndarray, seed: int) -> None:
    """Showers of these energies, under the names that the study has for both."""
    device = this_device()
    inputs, targets = (parse_field(each) for each in (task.data.inputs, task.data.targets))
    with new_h5(path) as (file, check_disk):
        file.attrs["kind"] = "generated"
        file.attrs["model"] = task.model.source
        file.attrs["study"] = f"{task.study}, task {task.id}, key {task.key()}"
        file.attrs["seed"] = seed
        file.attrs["versions"] = f"n3lo {VERSION}, torch {torch.__version__}"
        showers = file.create_dataset(
            inputs.dataset,
            (len(energies), 25, 25, 25),
            np.float32,
            chunks=(min(CHUNK, len(energies)), 25, 25, 25),
            compression="gzip",
            compression_opts=1,
            shuffle=True,
        )
        showers.attrs["unit"] = "GeV"
        file.create_dataset(targets.dataset, data=energies).attrs["unit"] = "GeV"
        for number, first in enumerate(range(0, len(energies), BATCH)):
            state = np.random.SeedSequence(seed, spawn_key=(number,)).generate_state(1)
            torch.manual_seed(int(state[0]))
            batch = torch.from_numpy(energies[first : first + BATCH]).to(device)
            showers[first : first + BATCH] = model.generate(batch).float().cpu().numpy()
            check_disk()


if __name__ == "__main__":
    sys.exit(main())
