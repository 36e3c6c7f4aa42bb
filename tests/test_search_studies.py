"""Search methods run real studies: their examples in studies/search, on the shipped jets.

In CI the one whose trials go on from others. `make long` runs all.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib

import pytest
from conftest import ROOT

from workflow.ledger import Ledger
from workflow.search import METHODS

pytestmark = pytest.mark.campaign

STUDIES = {path.stem: path for path in sorted((ROOT / "studies" / "search").glob("*.toml"))}


def test_every_method_has_an_example():
    methods = {tomllib.loads(path.read_text())["search"]["method"] for path in STUDIES.values()}
    assert methods == set(METHODS)


# Enough for the models of bayesian, multi and skopt to be asked (that of TPE is after ten trials).
FEWER = {"bayesian": 6, "multi": 7, "optuna": 2, "random": 1, "skopt": 4, "sobol": 2}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One folder for all, so that they share the cache."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def finished(runs):
    """Run an example once; its ledger."""
    ledgers: dict[str, Ledger] = {}

    def run(name: str) -> Ledger:
        if name not in ledgers:
            result = start(name, runs)
            assert result.returncode == 0, result
            ledgers[name] = Ledger(runs / f"search-{name}")
        return ledgers[name]

    return run


def start(name: str, runs) -> subprocess.CompletedProcess:
    words = ["--trials", str(FEWER[name])] if name in FEWER else []
    return subprocess.run(
        [sys.executable, str(ROOT / "run_workflow.py"), str(STUDIES[name]), "--runs", str(runs),
         *words],
        cwd=runs, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip


IN_CI = ("halving",)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in IN_CI else pytest.mark.long) for name in STUDIES],
)
def test_an_example_runs_to_its_end(finished, name):
    trials = finished(name).trials()
    budget = tomllib.loads(STUDIES[name].read_text())["search"]["num_trials"]
    expected = {"grid": 6, **FEWER}.get(name, budget)
    assert len(trials) == expected or (name == "constructive" and 8 <= len(trials) <= expected)
    assert set(trials["status"]) <= ({"done", "dropped"} if name == "bayesian" else {"done"})
    assert trials["score"].min() < 1.3  # ln 5 = 1.61 is chance


def test_a_promoted_trial_went_on_from_its_parents_last_epoch(finished):
    ledger = finished("halving")
    tasks = ledger.tasks().set_index(["trial", "fold"])
    promoted = ledger.trials().dropna(subset=["parent"])
    assert len(promoted) >= 2
    for row in promoted.to_dict("records"):
        for fold in (0, 1):
            parent = tasks.loc[(row["parent"], fold)]
            own = ledger.history(row["trial"], fold)
            assert own["epoch"].iloc[0] == parent["epochs"] + 1
            assert own["epoch"].iloc[-1] == row["training.epochs"]
    assert ledger.trials()["training.epochs"].max() == 9


@pytest.mark.long
def test_the_members_of_a_population_are_trained_in_full(finished):
    trials = finished("population").trials()
    last = trials[trials["step"] == 2]
    assert sorted(last["member"]) == [0, 1, 2, 3]
    assert set(last["training.epochs"]) == {9}
    exploited = trials.dropna(subset=["parent"]).merge(trials, left_on="parent", right_on="trial")
    assert (exploited["member_x"] != exploited["member_y"]).any()


@pytest.mark.long
def test_elites_of_an_evolution_are_not_trained_again(finished):
    trials = finished("evolution").trials()
    assert list(trials["generation"].value_counts().sort_index()) == [6, 5, 5]
    parameters = [name for name in trials.columns if name.startswith(("model.", "training."))]
    assert not trials.duplicated(parameters).any()


@pytest.mark.long
def test_layers_are_added_with_the_earlier_ones_kept(finished):
    trials = finished("constructive").trials()
    first = trials[trials["layer"] == 1]
    best = first.loc[first["score"].idxmin()]
    second = trials[trials["layer"] == 2]
    assert set(first["model.args.depth"]) == {1}
    assert set(second["model.args.depth"]) == {2}
    assert set(second["model.args.width_1"]) == {best["model.args.width_1"]}
    assert set(second["training.optimizer.lr"]) == {best["training.optimizer.lr"]}


@pytest.mark.long
def test_the_front_of_two_objectives_is_in_table_and_report(finished, runs):
    trials = finished("multi").trials()
    front = trials[trials["pareto"]]
    assert 1 <= len(front) <= len(trials)
    cheapest = trials["num_parameters"].idxmin()
    assert trials.loc[trials["score"].idxmin(), "pareto"]
    assert trials.loc[cheapest, "pareto"]
    report = subprocess.run(
        [sys.executable, str(ROOT / "run_workflow.py"), "report", str(STUDIES["multi"]),
         "--runs", str(runs)],
        cwd=runs, capture_output=True, text=True, check=True,
    )  # fmt: skip
    said = report.stdout.split("Pareto front", 1)[1].split("Cost")[0]
    assert all(f"t{number:03d}" in said for number in front["trial"])


@pytest.mark.long
def test_the_users_first_point_is_the_first_trial(finished):
    assert finished("bayesian").trials()["training.optimizer.lr"].iloc[0] == 3e-3


@pytest.mark.parametrize("name", ["halving", pytest.param("population", marks=pytest.mark.long)])
def test_a_second_start_trains_nothing(finished, runs, name):
    before = finished(name).path.read_text().count('"start"')
    assert start(name, runs).returncode == 0
    assert finished(name).path.read_text().count('"start"') == before


def test_what_halving_began_with_cannot_change_under_its_trials(finished, runs, tmp_path):
    finished("halving")
    text = STUDIES["halving"].read_text().replace("eta = 3", "eta = 2")
    (tmp_path / "edited.toml").write_text(text.replace("../data", str(ROOT / "studies/data")))
    result = subprocess.run(
        [sys.executable, str(ROOT / "run_workflow.py"), str(tmp_path / "edited.toml"),
         "--runs", str(runs)],
        cwd=runs, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 2
    assert "search.options: this study began 'halving' with {'eta': 3," in result.stderr


def test_a_warm_start_takes_what_fits_and_was_trained_in_full(finished, runs, tmp_path):
    finished("halving")
    text = STUDIES["random"].read_text().replace("../data", str(ROOT / "studies/data"))
    text = text.replace("search-random", "warmed").replace("num_trials   = 4", "num_trials = 1")
    text = text.replace(
        'method       = "random"', f'method = "bayesian"\nwarm_start = ["{runs}/search-halving"]'
    )
    (tmp_path / "warmed.toml").write_text(text)
    result = subprocess.run(
        [sys.executable, str(ROOT / "run_workflow.py"), str(tmp_path / "warmed.toml"),
         "--runs", str(tmp_path / "runs")],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result
    trials = finished("halving").trials()
    num_full = (trials["training.epochs"] == 9).sum()
    assert f"of {num_full} trials of {runs}/search-halving fit the space" in result.stdout
