"""What a trained task is used for: showers of its generator, its network in other programs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import onnxruntime
import pytest
import torch
from test_adversarial import TinyGan, gan_task, points_h5
from test_ledger import finish, start_session
from torch import nn
from training_helpers import JETS, ROOT, classes_h5, make_task, train_all, write_h5, write_task

from apps import export, generate
from apps.contract import Model, N3LOError, Objective, TaskPaths, TrainTask, read_json
from apps.trained import load_trained
from workflow import trained as of_driver
from workflow.ledger import Ledger
from workflow.search import Proposal

CPU = torch.device("cpu")
SHOWERS = ROOT / "studies/data/clic_ecal_electrons_geant4_part1.h5"


class Sum(nn.Module):
    """Of two inputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(1, 3)

    def forward(self, x: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        return self.first(x) + self.second(number.unsqueeze(1) / 100)


def showers_task(folder: Path) -> TrainTask:
    with h5py.File(SHOWERS) as file:
        few = {name: file[name][:24] for name in ("ECAL", "energy")}
    args = {
        "generator": {"latent_size": 4, "filters": [2, 2, 2]},
        "discriminator": {"filters": [2, 2, 2, 2]},
    }
    return make_task(
        [write_h5(folder / "showers.h5", **few)],
        model={"source": "apps.models.calorimeter_gan:CalorimeterGan", "args": args},
        data={"inputs": "ECAL", "targets": "energy", "folds": 2},
        training={"epochs": 1, "loss": "own", "optimizer": {"name": "adam"}},
        objective={"metric": "val_shower_error", "goal": "min"},
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Trained tasks, in one launch."""
    root = tmp_path_factory.mktemp("trained")
    events = classes_h5(root / "events.h5")
    jets = {"source": "apps.models.jets:DeepSets", "args": {}}
    table = {"inputs": {"x": "x", "number": "number"}}
    source = {"source": f"{Path(__file__)}:Sum", "args": {}}
    tasks = {
        "jets": make_task(
            [JETS],
            model=jets,
            data={"inputs": "jetConstituentList", "targets": "jets[:, -6:-1]"},
            training={"epochs": 1, "batch_size": 200},
        ),
        "table": make_task([events], model=source, data=table, training={"epochs": 1}),
        "gan": gan_task(points_h5(root / "points.h5"), training={"epochs": 1}),
        "broken": replace(
            gan_task(points_h5(root / "points.h5"), training={"epochs": 1}),
            model=Model(source=f"{Path(__file__)}:Broken"),
        ),
        "showers": showers_task(root),
    }
    train_all(1, *(write_task(root / name, task) for name, task in tasks.items()))
    return {name: root / name for name in tasks}


# -- the network in other programs -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "network", "suffix"),
    [
        ("jets", None, ".onnx"),
        ("table", None, ".onnx"),
        ("table", None, ".pt2"),
        ("gan", "generator", ".pt2"),
    ],
)
def test_an_exported_network_gives_the_same_for_any_number_of_events(
    folders, tmp_path, task, network, suffix
):
    out = tmp_path / f"model{suffix}"
    words = [str(folders[task]), str(out), *(["--network", network] if network else [])]
    assert export.main(words) == 0
    assert [each.name for each in tmp_path.iterdir()] == [out.name]
    events = 7
    inputs = {
        "jets": {"inputs": torch.rand(events, 100, 16)},
        "table": {"x": torch.rand(events, 3), "number": torch.rand(events)},
        "gan": {"inputs": torch.rand(events, 3)},
    }[task]
    _, experiment = load_trained(folders[task], CPU)
    with torch.no_grad():
        by_name = task == "table"
        one = experiment.networks[network or "model"]
        expected = one(**inputs) if by_name else one(*inputs.values())
    if suffix == ".onnx":
        session = onnxruntime.InferenceSession(str(out), providers=["CPUExecutionProvider"])
        names = [each.name for each in session.get_inputs()]
        values = [each.numpy() for each in inputs.values()]
        (found,) = session.run(None, dict(zip(names, values, strict=True)))
    else:
        program = torch.export.load(out).module()
        found = program(**inputs) if by_name else program(*inputs.values())
    torch.testing.assert_close(torch.as_tensor(found), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["out.onnx"], "--network: name one of critic, generator"),
        (["out.onnx", "--network", "forger"], "--network forger: there is none, only critic, "
         "generator"),
        (["out.h5", "--network", "critic"], "--to out.h5: it ends in none of .pt2, .onnx"),
        (["none/out.pt2", "--network", "critic"], "--to none/out.pt2: there is no folder none"),
    ],
)  # fmt: skip
def test_what_cannot_be_exported_is_one_line(folders, tmp_path, monkeypatch, capsys, words, line):
    monkeypatch.chdir(tmp_path)
    assert export.main([str(folders["gan"]), *words]) == 2
    assert capsys.readouterr().err == line + "\n"
    assert list(tmp_path.iterdir()) == []


class Broken(TinyGan):
    """Its critic decides by the numbers that it gets, which no exporter can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.networks["critic"] = Deciding()


class Deciding(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if x.sum().item() > 0 else -x)


@pytest.mark.parametrize("suffix", [".onnx", ".pt2"])
def test_a_network_that_cannot_be_exported_is_named_with_the_reason(
    folders, tmp_path, capsys, suffix
):
    out = tmp_path / f"critic{suffix}"
    assert export.main([str(folders["broken"]), str(out), "--network", "critic"]) == 2
    *_, line = capsys.readouterr().err.splitlines()  # torch may have said something before
    assert line.startswith(f"network 'critic' cannot be exported to {suffix}: ")
    assert list(tmp_path.iterdir()) == []


def test_a_network_that_gives_other_numbers_is_not_left_behind(
    folders, tmp_path, monkeypatch, capsys
):
    monkeypatch.setitem(export.WRITE, ".pt2", lambda net, args, *_: net(*args).detach() * 1.01)
    out = tmp_path / "critic.pt2"
    assert export.main([str(folders["gan"]), str(out), "--network", "critic"]) == 2
    assert "the exported 'critic' gives other numbers: they differ by" in capsys.readouterr().err
    assert not out.exists()


# -- showers ---------------------------------------------------------------------------------------


def generated(path: Path) -> dict[str, np.ndarray]:
    with h5py.File(path) as file:
        return {name: file[name][:] for name in ("ECAL", "energy")}


def test_showers_are_written_in_the_layout_that_was_learned_from(folders, tmp_path):
    out = tmp_path / "made.h5"
    words = ["--events", "230", "--energy", "20", "50", "--seed", "3"]
    assert generate.main([str(folders["showers"]), str(out), *words]) == 0
    with h5py.File(out) as made, h5py.File(SHOWERS) as real:
        for name in ("ECAL", "energy"):
            assert made[name].dtype == real[name].dtype
            assert made[name].attrs["unit"] == real[name].attrs["unit"] == "GeV"
            assert made[name].shape == (230, *real[name].shape[1:])
        assert made.attrs["kind"] == "generated"
        assert made["energy"][:].min() >= 20
        assert made["energy"][:].max() <= 50


def test_the_same_seed_gives_the_same_showers_and_another_one_others(folders, tmp_path):
    made, energies = {}, np.linspace(10, 100, 60, dtype=np.float32)
    like = write_h5(tmp_path / "like.h5", energy=energies)
    for name, seed in (("a", "3"), ("b", "3"), ("c", "4")):
        out = tmp_path / f"{name}.h5"
        words = ["--like", str(like), "--seed", seed]
        assert generate.main([str(folders["showers"]), str(out), *words]) == 0
        made[name] = generated(out)
    np.testing.assert_array_equal(made["a"]["ECAL"], made["b"]["ECAL"])
    assert not np.array_equal(made["a"]["ECAL"], made["c"]["ECAL"])
    for each in made.values():
        np.testing.assert_array_equal(each["energy"], energies)


def test_batches_of_showers_have_random_numbers_of_their_own(folders, tmp_path):
    out = tmp_path / "made.h5"
    energies = write_h5(tmp_path / "same.h5", energy=np.full(2 * generate.BATCH, 50, np.float32))
    assert generate.main([str(folders["showers"]), str(out), "--like", str(energies)]) == 0
    first, second = np.split(generated(out)["ECAL"], 2)
    assert not np.array_equal(first, second)


@pytest.mark.parametrize(
    ("task", "words", "line"),
    [
        ("jets", [], "model 'DeepSets' makes no showers: it is not derived from "
         "apps.models.showers.ShowerModel"),
        ("showers", ["--events", "0"], "--events 0: is not at least 1"),
        ("showers", ["--energy", "50", "20"], "--energy 50 20: give the lower one first, above 0, "
         "in GeV"),
    ],
)  # fmt: skip
def test_what_cannot_be_generated_is_one_line(folders, tmp_path, capsys, task, words, line):
    assert generate.main([str(folders[task]), str(tmp_path / "out.h5"), *words]) == 2
    assert capsys.readouterr().err == line + "\n"
    assert list(tmp_path.iterdir()) == []


# -- tasks -----------------------------------------------------------------------------------------


def test_a_task_without_a_result_is_named(folders, tmp_path):
    write_task(tmp_path / "t000-f0", make_task([tmp_path / "a.h5"]))
    with pytest.raises(N3LOError, match=r"task t000-f0 is not finished: there is no .*result.json"):
        load_trained(tmp_path / "t000-f0", CPU)


def test_a_model_that_was_changed_after_its_training_is_named(folders, tmp_path):
    content = read_json(TaskPaths(folders["table"]).task)
    content["model"] = {"source": "torch.nn:Linear", "args": {"in_features": 3, "out_features": 4}}
    for name in ("result.json", "weights.pt"):
        (tmp_path / name).symlink_to(folders["table"] / name)
    (tmp_path / "task.json").write_text(json.dumps(content))
    with pytest.raises(N3LOError, match=r"the model 'torch.nn:Linear' is not what it was when"):
        load_trained(tmp_path, CPU)


def test_the_adversaries_of_a_loaded_task_hold_the_trained_weights(folders):
    weights = torch.load(folders["gan"] / "weights.pt")
    _, experiment = load_trained(folders["gan"], CPU)
    assert type(experiment.adversaries).__name__ == TinyGan.__name__
    for name, network in experiment.adversaries.networks.items():
        assert not network.training
        for key, value in network.state_dict().items():
            assert torch.equal(value, weights[name][key])


def test_the_driver_takes_the_best_trial_that_finished_the_fold(tmp_path):
    ledger = Ledger(tmp_path)
    start_session(ledger)
    for trial in range(2):
        ledger.record_trial(Proposal({"a.lr": 0.1 * trial}, number=trial), num_folds=2)
    for trial, fold, fom in ((0, 0, 0.4), (0, 1, 0.2), (1, 0, 0.1)):
        finish(ledger, trial, fold, fom)
    study = SimpleNamespace(search=SimpleNamespace(objective=Objective(goal="min")))
    assert of_driver.folder_of(ledger, study, None, 0).name == "t000-f0"  # 1 has no score yet
    assert of_driver.folder_of(ledger, study, 1, 0).name == "t001-f0"
    assert of_driver.folder_of(ledger, study, 0, 1).name == "t000-f1"
    with pytest.raises(N3LOError, match=r"--trial 7 --fold 0: that task is not finished; see"):
        of_driver.folder_of(ledger, study, 7, 0)
    with pytest.raises(N3LOError, match=r"no trial has finished fold 5 yet"):
        of_driver.folder_of(ledger, study, None, 5)


def test_the_line_of_a_program_is_the_line_of_the_command(tmp_path):
    with pytest.raises(N3LOError, match=r"^task nowhere is not finished: there is no"):
        of_driver.run_program("generate", [str(tmp_path / "nowhere"), str(tmp_path / "out.h5")])
