"""Several models together: what NumPy and SciPy make of the same weights, and what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from scipy.special import expit, log_softmax, softmax
from torch import nn
from training_helpers import classes_h5, make_task, train_all, write_h5, write_task

from apps.adversarial import Adversaries
from apps.contract import N3LOError, TaskPaths, TrainTask, read_json
from apps.data import prepare, validates
from apps.ensemble import AVERAGES, CAUTION, Member, Scores, ensemble, table
from apps.experiment import make_experiment
from workflow import cli
from workflow.ledger import Ledger, session_facts
from workflow.search import Proposal

FOLDS = 2
RATES = (0.3, 0.1, 0.02)  # of trials, the best first


class Perceptron(nn.Module):
    def __init__(self, width: int, classes: int = 3) -> None:
        super().__init__()
        self.hidden, self.last = nn.Linear(3, width), nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.hidden(x)))


class Line(nn.Module):
    """One number an event, as (B,) or (B, 1)."""

    def __init__(self, flat: bool, inputs: int = 3) -> None:
        super().__init__()
        self.flat, self.layer = flat, nn.Linear(inputs, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[:, 0] if self.flat else self.layer(x)


class Both(nn.Module):
    """A number and a vector of two, by name or in a list."""

    def __init__(self, by_name: bool) -> None:
        super().__init__()
        self.by_name, self.layer = by_name, nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> Any:
        values = self.layer(x)
        one, two = values[:, 0], values[:, 1:]
        return {"two": two, "one": one} if self.by_name else (one, two)


class Rivals(Adversaries):
    turns = ("one", "other")

    def __init__(self) -> None:
        self.networks = {"one": nn.Linear(3, 1), "other": nn.Linear(3, 1)}


def model(name: str, **args: Any) -> dict[str, Any]:
    return {"source": f"{Path(__file__)}:{name}", "args": args}


# -- trained models of a classification ------------------------------------------------------------


@pytest.fixture(scope="module")
def events(tmp_path_factory) -> Path:
    return classes_h5(tmp_path_factory.mktemp("data") / "classes.h5")


@pytest.fixture(scope="module")
def trained(tmp_path_factory, events) -> list[Member]:
    """Three trials of two folds, each with another batch size and learning rate."""
    runs = tmp_path_factory.mktemp("runs")
    tasks = [
        make_task(
            [events],
            trial=trial,
            fold=fold,
            seed=trial,
            data={"folds": FOLDS},
            training={
                "batch_size": 5 + trial,
                "metrics": ["accuracy"],
                "optimizer": {"name": "sgd", "lr": rate},
            },
        )
        for trial, rate in enumerate(RATES)
        for fold in range(FOLDS)
    ]
    train_all(1, *(write_task(runs / task.id, task) for task in tasks))
    return [
        Member(f"t{trial:03d}", [runs / f"t{trial:03d}-f{fold}" for fold in range(FOLDS)])
        for trial in range(len(RATES))
    ]


@pytest.fixture(scope="module")
def judged(trained, tmp_path_factory) -> tuple[Scores, Path]:
    folder = tmp_path_factory.mktemp("out") / "ensemble"
    return ensemble(trained, folder), folder


def validation_events(folder: Path) -> np.ndarray:
    task = TrainTask.read(TaskPaths(folder).task)
    return np.flatnonzero(validates(prepare(task.data, task.split_seed)[1], task.fold))


def weights_of(folder: Path) -> dict[str, np.ndarray]:
    weights = torch.load(TaskPaths(folder).weights, weights_only=True)
    return {name: values.numpy().astype(float) for name, values in weights.items()}


def expected(members: list[Member], events: Path, fold: int) -> tuple[np.ndarray, list[float]]:
    """The mean of the members' probabilities, and its cross-entropy and accuracy; in float64."""
    x, y = validated(members[0].folders[fold], events, "x", "y")
    weights = [weights_of(member.folders[fold]) for member in members]
    mean = np.mean([softmax(x @ w["weight"].T + w["bias"], axis=1) for w in weights], axis=0)
    return mean, of_probabilities(mean, y)


def of_probabilities(mean: np.ndarray, y: np.ndarray) -> list[float]:
    right = mean[np.arange(len(y)), y.astype(int)]
    return [-np.log(right).mean(), (mean.argmax(axis=1) == y).mean()]


def validated(folder: Path, file: Path, *names: str) -> list[np.ndarray]:
    numbers = validation_events(folder)
    with h5py.File(file) as content:
        return [content[name][:][numbers].astype(float) for name in names]


def test_a_single_model_has_the_loss_and_accuracy_that_its_training_found(trained, judged):
    scores, _ = judged
    assert scores.metrics == ["loss", "accuracy"]
    for number, member in enumerate(trained):
        for fold, folder in enumerate(member.folders):
            found = read_json(TaskPaths(folder).result)["metrics"]
            assert_allclose(
                scores.single[fold, number], [found["val_loss"], found["val_accuracy"]], rtol=1e-6
            )


def test_classifiers_are_averaged_by_their_probabilities(trained, judged, events):
    scores, _ = judged
    for fold in range(FOLDS):
        for count in range(1, len(trained) + 1):
            _, values = expected(trained[:count], events, fold)
            assert_allclose(scores.averaged[fold, count - 1], values, rtol=1e-5)


def test_the_gain_is_above_zero_where_the_average_is_better(judged):
    scores, _ = judged
    loss, accuracy = np.moveaxis(scores.gain, 2, 0)
    assert_allclose(loss, scores.single[:, :1, 0] - scores.averaged[:, :, 0])
    assert_allclose(accuracy, scores.averaged[:, :, 1] - scores.single[:, :1, 1])


def test_the_file_has_the_validation_events_of_each_fold_with_mean_probabilities(
    trained, judged, events
):
    _, folder = judged
    with h5py.File(folder / "predictions.h5") as file:
        assert list(file) == ["fold0", "fold1"]
        for fold in range(FOLDS):
            numbers = validation_events(trained[0].folders[fold])
            np.testing.assert_array_equal(file[f"fold{fold}/events"], numbers)
            mean, _ = expected(trained, events, fold)
            assert_allclose(file[f"fold{fold}/output"], mean, rtol=1e-4, atol=1e-7)
            assert file[f"fold{fold}/output"].attrs["values"] == "probabilities"


def test_the_description_names_the_members_and_all_numbers(trained, judged):
    scores, folder = judged
    content = json.loads((folder / "ensemble.json").read_text())
    assert content["averaged"] == "probabilities"
    for member, described in zip(trained, content["members"], strict=True):
        assert described["trial"] == member.name
        assert described["weight"] == pytest.approx(1 / 3)
        assert all(map(os.path.exists, described["weights"]))
    assert content["single"][1]["accuracy"] == scores.single[:, 1, 1].tolist()
    assert content["first_averaged"][2] == {
        "models": 3,
        "loss": scores.averaged[:, 2, 0].tolist(),
        "accuracy": scores.averaged[:, 2, 1].tolist(),
    }
    assert content["gain_over_best"][1]["loss"] == scores.gain[:, 1, 0].tolist()


def test_the_average_of_a_model_with_itself_changes_nothing(trained):
    scores = ensemble([trained[0]] * 3)
    assert_allclose(scores.averaged, scores.single, rtol=1e-6)
    assert_allclose(scores.gain, 0, atol=1e-6)


def test_the_table_has_means_spreads_and_paired_gains():
    single = np.array([[[0.5], [0.7]], [[0.3], [0.6]]])
    averaged = np.array([[[0.5], [0.4]], [[0.3], [0.26]]])
    assert table(Scores(["t004", "t001"], ["loss"], single, averaged)) == [
        "                  loss          gain over t004",
        "t004              0.4 ± 0.14",
        "t001              0.65 ± 0.071",
        "first 2 averaged  0.33 ± 0.099  +0.07 ± 0.042",
    ]


def test_one_fold_has_no_spread():
    scores = Scores(["t0", "t1"], ["accuracy"], np.full((1, 2, 1), 0.5), np.full((1, 2, 1), 0.75))
    assert table(scores)[-1].split() == ["first", "2", "averaged", "0.75", "+0.25"]


# -- other losses and forms ------------------------------------------------------------------------


def finished(folder: Path, task: TrainTask) -> Path:
    """A task as a training leaves it, with weights from its seed."""
    torch.manual_seed(task.seed)
    experiment = make_experiment(task.model, task.training)
    write_task(folder, task)
    states = {name: network.state_dict() for name, network in experiment.networks.items()}
    torch.save(experiment.weights(states), TaskPaths(folder).weights)
    TaskPaths(folder).result.write_text("{}")
    return folder


def members_of(folder: Path, *tasks: TrainTask) -> list[Member]:
    return [
        Member(f"t{number}", [finished(folder / f"t{number}", task)])
        for number, task in enumerate(tasks)
    ]


def two_tasks(events: Path, models: list[dict[str, Any]], loss: str, **data: Any):
    training = {"loss": loss, "metrics": ["mae"] if loss == "mse" else ["accuracy"]}
    return [
        make_task([events], seed=seed, model=each, data=data, training=training)
        for seed, each in enumerate(models)
    ]


def line_of(member: Member, x: np.ndarray) -> np.ndarray:
    weights = weights_of(member.folders[0])
    return x @ weights["layer.weight"].T + weights["layer.bias"]


def perceptron_of(member: Member, x: np.ndarray) -> np.ndarray:
    weights = weights_of(member.folders[0])
    hidden = np.tanh(x @ weights["hidden.weight"].T + weights["hidden.bias"])
    return hidden @ weights["last.weight"].T + weights["last.bias"]


@pytest.fixture
def numbers_h5(tmp_path) -> Path:
    rng = np.random.default_rng(6)
    x = rng.normal(size=(90, 3)).astype(np.float32)
    one, two = x.sum(axis=1), x[:, :2] ** 2
    return write_h5(tmp_path / "numbers.h5", 16, x=x, one=one, two=two, yes=(one > 0).astype("i4"))


def test_classifiers_may_be_of_different_architectures(tmp_path, events):
    models = [model("Perceptron", width=4), model("Perceptron", width=9)]
    members = members_of(tmp_path, *two_tasks(events, models, "cross_entropy"))
    scores = ensemble(members)
    x, y = validated(members[0].folders[0], events, "x", "y")
    mean = np.mean([softmax(perceptron_of(each, x), axis=1) for each in members], axis=0)
    assert_allclose(scores.averaged[0, 1], of_probabilities(mean, y), rtol=1e-5)


def test_regressors_are_averaged_by_their_outputs_in_whatever_shape(tmp_path, numbers_h5):
    lines = [model("Line", flat=False), model("Line", flat=True)]
    members = members_of(tmp_path, *two_tasks(numbers_h5, lines, "mse", targets="one"))
    scores = ensemble(members, tmp_path / "out")
    x, target = validated(members[0].folders[0], numbers_h5, "x", "one")
    mean = np.mean([line_of(each, x) for each in members], axis=0)
    error = mean[:, 0] - target
    assert_allclose(scores.averaged[0, 1], [(error**2).mean(), abs(error).mean()], rtol=1e-5)
    with h5py.File(tmp_path / "out/predictions.h5") as file:
        assert_allclose(file["fold0/output"], mean, rtol=1e-4, atol=1e-6)
        assert file["fold0/output"].attrs["values"] == "outputs"


@pytest.mark.parametrize("by_name", [True, False])
def test_several_outputs_are_averaged_each_for_itself(tmp_path, numbers_h5, by_name):
    targets = {"one": "one", "two": "two"} if by_name else ["one", "two"]
    models = [model("Both", by_name=by_name)] * 2
    members = members_of(tmp_path, *two_tasks(numbers_h5, models, "mse", targets=targets))
    scores = ensemble(members, tmp_path / "out")
    x, one, two = validated(members[0].folders[0], numbers_h5, "x", "one", "two")
    mean = np.mean([line_of(each, x) for each in members], axis=0)
    errors = mean[:, 0] - one, mean[:, 1:] - two
    absolute = np.concatenate([each.ravel() for each in errors])
    loss = sum((each**2).mean() for each in errors)
    assert_allclose(scores.averaged[0, 1], [loss, abs(absolute).mean()], rtol=1e-5)
    names = ["output_one", "output_two"] if by_name else ["output_0", "output_1"]
    with h5py.File(tmp_path / "out/predictions.h5") as file:
        for name, values in zip(names, (mean[:, 0], mean[:, 1:]), strict=True):
            assert_allclose(file["fold0"][name], values, rtol=1e-4, atol=1e-6)


def test_models_that_take_other_inputs_predict_the_same_events(tmp_path, numbers_h5):
    tasks = two_tasks(numbers_h5, [model("Line", flat=True)], "bce", targets="yes")
    tasks += two_tasks(
        numbers_h5, [model("Line", flat=True, inputs=2)], "bce", targets="yes", inputs="x[:, 1:]"
    )
    members = members_of(tmp_path, *tasks)
    scores = ensemble(members)
    x, yes = validated(members[0].folders[0], numbers_h5, "x", "yes")
    mean = (expit(line_of(members[0], x)) + expit(line_of(members[1], x[:, 1:])))[:, 0] / 2
    loss = -(yes * np.log(mean) + (1 - yes) * np.log1p(-mean)).mean()
    assert_allclose(scores.averaged[0, 1], [loss, ((mean > 0.5) == yes).mean()], rtol=1e-5)


def test_probabilities_that_round_to_one_still_have_the_right_mean():
    """1 - p = (exp(-200) + exp(-150)) / 2, of which the first is nothing."""
    average = AVERAGES["binary_cross_entropy_with_logits"]
    both = average.add(*(average.form(torch.tensor([each])) for each in (200.0, 150.0)))
    assert average.back(both, 2).item() == pytest.approx(150 + np.log(2), rel=1e-6)


@pytest.mark.parametrize("loss", ["cross_entropy", "nll_loss"])
def test_the_mean_of_classes_is_given_as_logarithms(loss):
    logits = np.random.default_rng(3).normal(size=(2, 5, 3), scale=3)
    given = log_softmax(logits, axis=2) if loss == "nll_loss" else logits
    average = AVERAGES[loss]
    both = average.add(*(average.form(torch.tensor(each)) for each in given))
    assert_allclose(average.back(both, 2), np.log(softmax(logits, axis=2).mean(axis=0)))


# -- what is refused -------------------------------------------------------------------------------


def refused(members: list[Member], to: Path | None = None) -> str:
    with pytest.raises(N3LOError) as error:
        ensemble(members, to)
    return str(error.value)


def test_a_task_that_is_not_finished_is_refused_and_leaves_nothing(tmp_path, events):
    tasks = [make_task([events])] * 2
    members = members_of(tmp_path, *tasks)
    TaskPaths(members[1].folders[0]).result.unlink()
    assert "task t1 is not finished" in refused(members, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_networks_that_train_against_each_other_are_refused(tmp_path, events):
    members = members_of(
        tmp_path, make_task([events], model=model("Rivals"), training={"loss": "own"})
    )
    assert refused(members) == (
        "t0: 'Rivals' brings its losses (training.loss = 'own'), so that it is not known how its "
        "outputs are to be averaged"
    )


def test_models_of_another_loss_are_refused(tmp_path, events):
    tasks = [make_task([events], training={"loss": loss}) for loss in ("cross_entropy", "nll_loss")]
    assert refused(members_of(tmp_path, *tasks)) == (
        "t1: its training.loss is nll_loss, and that of t0 is cross_entropy: they cannot be "
        "averaged"
    )


def test_models_with_another_number_of_classes_are_refused(tmp_path, events):
    tasks = [
        make_task([events], model=model("Perceptron", width=2, classes=classes))
        for classes in (3, 4)
    ]
    assert refused(members_of(tmp_path, *tasks)) == (
        "t1: gives (4,) for an event, and the best model (3,): they cannot be averaged"
    )


def test_models_with_other_validation_events_are_refused(tmp_path, events):
    tasks = [make_task([events], data={"stratify": stratify}) for stratify in (True, False)]
    assert "t1: has other validation events than t0" in refused(members_of(tmp_path, *tasks))


def test_members_with_fewer_training_events_have_the_same_validation_events(tmp_path, events):
    tasks = [make_task([events], data={"train_fraction": fraction}) for fraction in (1.0, 0.3)]
    assert ensemble(members_of(tmp_path, *tasks)).single.shape == (1, 2, 1)


def test_every_member_has_all_folds(trained):
    assert "as many task folders" in refused([trained[0], Member("t9", trained[1].folders[:1])])


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture
def ledger(tmp_path, study_path) -> Ledger:
    """Of `study_path`, started, without a trial."""
    folder = tmp_path / "runs/small"
    folder.mkdir(parents=True)
    ledger = Ledger(folder)
    fingerprint = make_task([study_path]).fingerprint
    ledger.record_session(**session_facts(fingerprint, site="local"))
    return ledger


def record(ledger: Ledger, member: Member) -> None:
    tasks = [TrainTask.read(TaskPaths(folder).task) for folder in member.folders]
    ledger.record_trial(Proposal({}, number=tasks[0].trial), num_folds=FOLDS)
    for task, folder in zip(tasks, member.folders, strict=True):
        result = read_json(TaskPaths(folder).result)
        ledger.record_done(task, result, cached=False, folder=ledger.relative(folder))


def command(study_path: Path, *words: object) -> int:
    return cli.main(["ensemble", str(study_path), "--runs", "runs", *map(str, words)])


@pytest.fixture(autouse=True)
def in_the_folder_of_the_test(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_the_command_averages_the_best_trials_and_says_how_many(
    trained, ledger, study_path, capfd, tmp_path
):
    for member in reversed(trained):
        record(ledger, member)
    ledger.record_trial(Proposal({}, number=3), num_folds=FOLDS)  # has not finished
    assert command(study_path, "--best", 5, "--to", "out") == 0
    said = capfd.readouterr()
    lines = said.out.splitlines()
    assert said.err == ""
    assert lines[0] == "--best 5: only 3 finished all folds"
    scores = [np.mean(Ledger(ledger.folder).trials_by_number[n].foms()) for n in range(3)]
    order = [f"t{number:03d}" for number in np.argsort(scores)]
    first_words = [line.split()[0] for line in lines[2:]]
    assert first_words == [*order, "first", "first", "±"]
    assert lines[-1] == CAUTION
    members = read_json(tmp_path / "out/ensemble.json")["members"]
    assert [each["trial"] for each in members] == order


def test_without_a_finished_trial_there_is_nothing_to_average(ledger, study_path, capfd):
    assert command(study_path) == 2
    assert capfd.readouterr().err == (
        "n3lo: no trial has finished all its folds yet; see 'status'\n"
    )


def test_a_number_of_trials_is_at_least_one(ledger, study_path, capfd):
    assert command(study_path, "--best", 0) == 2
    assert capfd.readouterr().err == "n3lo: --best 0: is not at least 1\n"
