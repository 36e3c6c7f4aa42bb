"""The best trials: their table, the best against the second, and the headline facts."""

from __future__ import annotations

import io
import json
import math

import numpy as np
import pytest
from made_runs import BEGIN, Made, make_run
from rich.console import Console as Terminal
from scipy.stats import ttest_rel
from told_runs import Told, write_run

from workflow import look, report, trained
from workflow.best import against_runner_up, best_table, corrected_t, summary
from workflow.compare import course, table
from workflow.console import best_line
from workflow.figures import search
from workflow.stop import node_hours
from workflow.surrogate import Surrogate
from workflow.view import View


def view_of(tmp_path, foms: list[list[float]], goal: str = "min") -> View:
    """A study whose trials have these figures of merit on their folds."""
    num_folds = max(map(len, foms), default=1)
    folder = make_run(tmp_path / "run", Made(num_trials=len(foms) or 1, num_folds=num_folds))
    rows = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    rows[0]["scoring"]["objective"]["goal"] = goal
    kept = []
    for row in rows:
        has = row["event"] == "session" or row["trial"] < len(foms)
        if has and row["event"] == "trial":
            row["num_folds"] = len(foms[row["trial"]])
        if has and "fold" in row:
            has = row["fold"] < len(foms[row["trial"]])
        if has and row["event"] == "end":
            row["result"]["fom"] = foms[row["trial"]][row["fold"]]
        kept += [row] * has
    (folder / "ledger.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    return View(folder)


def test_the_table_has_the_best_first_with_its_folds_and_parameters(tmp_path):
    table = best_table(view_of(tmp_path, [[3.0, 5.0], [1.0, 2.0], [6.0, 8.0]]), num=2)
    assert table["trial"].tolist() == [1, 0]
    assert table["score"].tolist() == [1.5, 4.0]
    assert table[["fold_0", "fold_1"]].to_numpy().tolist() == [[1.0, 2.0], [3.0, 5.0]]
    assert table["spread"].tolist() == pytest.approx([math.sqrt(0.5), math.sqrt(2)])
    assert "training.optimizer.lr" in table.columns


def test_without_the_correction_it_is_the_paired_t_test_of_scipy():
    rng = np.random.default_rng(3)
    for number in (2, 3, 5, 10):
        differences = rng.random(number) - 0.2
        mean, error, t, p = corrected_t(differences, number)
        factor = math.sqrt(1 + number / (number - 1))
        plain = ttest_rel(differences, np.zeros(number))
        assert mean == pytest.approx(differences.mean())
        assert error / factor == pytest.approx(differences.std(ddof=1) / math.sqrt(number))
        assert t * factor == pytest.approx(plain.statistic)
        noisier = mean + factor * (differences - mean)
        assert p == pytest.approx(ttest_rel(noisier, np.zeros(number)).pvalue)


def test_a_comparison_by_hand(tmp_path):
    """Differences 1, 2, 3: s^2 = 1, error^2 = 1/3 + 1/2, t = 2 / 0.9129; with 2 degrees of freedom
    p = 1 - t / sqrt(2 + t^2).
    """
    found = against_runner_up(view_of(tmp_path, [[9.0, 9.0, 9.0], [2.0, 3.0, 4.0], [1.0] * 3]))
    assert (found.best, found.second, found.folds, found.num_trials) == (2, 1, 3, 3)
    assert found.difference == 2
    assert found.error == pytest.approx(math.sqrt(5 / 6))
    assert found.t == pytest.approx(2 / math.sqrt(5 / 6))
    assert found.p == pytest.approx(1 - found.t / math.sqrt(2 + found.t**2))
    assert str(found) == (
        "t002 is better than t001 by 2 ± 0.91 on 3 shared folds (p = 0.16, corrected for shared "
        "training data; the best of 3 is flattered by having been picked)"
    )


def test_where_more_is_better_the_best_has_more(tmp_path):
    found = against_runner_up(view_of(tmp_path, [[1.0, 2.0], [3.0, 5.0]], goal="max"))
    assert (found.best, found.difference) == (1, 2.5)


def test_only_shared_folds_are_compared_and_the_overlap_is_that_of_all(tmp_path):
    found = against_runner_up(view_of(tmp_path, [[1.0, 1.0], [2.0, 4.0, 9.0]]))
    assert (found.folds, found.difference) == (2, 2)
    assert found.error == pytest.approx(math.sqrt(2 * (1 / 2 + 1 / 2)))


@pytest.mark.parametrize(
    ("foms", "said"),
    [
        ([], "no trial has a score yet"),
        ([[1.0, 2.0]], "t000 is the only trial with a score"),
        ([[1.0, 2.0], [1.0, 2.0]], "t000 and t001 are equally good on 2 shared folds"),
        ([[1.0], [2.0]], "by 1 on 1 shared fold, which does not tell how much of it is chance"),
        ([[1.0, 2.0], [2.0, 3.0]], "by 1 ± 0 on 2 shared folds (p < 0.001"),
    ],
)
def test_it_says_what_little_there_is_to_say(tmp_path, foms, said):
    assert said in str(against_runner_up(view_of(tmp_path, foms)))


def test_a_penalty_may_put_first_what_is_worse_on_average(tmp_path):
    view = view_of(tmp_path, [[1.0, 1.0], [0.0, 1.8]])
    view.ledger.sessions[-1]["scoring"]["spread_penalty"] = 1.0
    assert str(against_runner_up(view)).startswith("t000 is worse on average than t001 by 0.1 ±")


def test_all_name_the_same_best_trial_which_was_trained_in_full(tmp_path):
    """The best scores are those of little training, and one that is not finite."""
    less = {"training.epochs": 1}
    foms = [[0.1, 0.1], [0.2, 0.2], [0.7, 0.7], [0.4, 0.4], [-math.inf, -math.inf]]
    trials = [
        Told(point={"a": 0.1 * n}, foms=fom, settings=less if n < 2 else {})
        for n, fom in enumerate(foms)
    ]
    view = write_run(tmp_path / "run", trials)
    ledger, study = view.ledger, view.file.study
    assert view.best_first["trial"].tolist() == best_table(view)["trial"].tolist() == [3, 2]
    assert view.ranked["trial"].tolist()[:2] == [3, 2]
    assert sorted(view.ranked["trial"]) == [0, 1, 2, 3, 4]
    seen = look.overview(ledger, study)
    assert json.loads(json.dumps(seen, allow_nan=False)) == seen
    assert seen["best"] == summary(view)["best"]
    assert (seen["best"]["trial"], seen["best"]["score"]) == (3, 0.4)
    assert best_line(ledger, study.search.objective).endswith("(t003)")
    assert list(trained.best_folders(ledger, study, 5)) == [3, 2]
    assert trained.folder_of(ledger, study, None, 0).name == "t003-f0"
    [row] = table([view]).to_dict("records")
    assert (row["best"], row["score"]) == ("t003", course(view).best[-1]) == ("t003", 0.4)
    assert "(t003)" in search.convergence(view).layout.title.text
    assert max(search.slices(view, Surrogate.of(view)).data[0].y) == 0.7
    for say in (report.print_best, report.print_report):
        said = io.StringIO()
        say(ledger, study, Terminal(file=said, width=200))
        assert "t003" in said.getvalue()
        assert "t000" not in said.getvalue()


@pytest.mark.parametrize("status", ["running", "failed"])
def test_as_long_as_none_is_trained_in_full_the_best_is_of_those_that_got_furthest(
    tmp_path, status
):
    budgets = ({"training.epochs": 1}, {"training.epochs": 3})
    less = [
        Told(point={"a": 0.1}, foms=[fom] * 2, settings=b)
        for fom, b in zip((0.1, 0.2), budgets, strict=True)
    ]
    view = write_run(tmp_path / "run", [*less, Told(point={"a": 0.1}, status=status)])
    assert summary(view)["best"]["trial"] == 1
    assert str(against_runner_up(view)) == "t001 is the only trial with a score"
    assert "(t001)" in best_line(view.ledger, view.file.study.search.objective)


def test_a_score_that_is_not_finite_is_none(tmp_path):
    trials = [Told(point={"a": 0.1}, foms=[math.inf] * 2) for _ in range(2)]
    view = write_run(tmp_path / "run", trials)
    assert str(against_runner_up(view)) == "no trial has a score yet"
    assert json.dumps(summary(view), allow_nan=False)


def test_the_best_is_not_compared_with_what_it_goes_on_from(tmp_path):
    """3 goes on from 1, which goes on from 0, and 4 from 3; 2 has the same parent as 1."""
    foms, parents = [0.40, 0.30, 0.50, 0.10, 0.20], [None, 0, 0, 1, 3]
    trials = [
        Told(point={"a": 0.1}, foms=[fom, fom + 0.01], parent=parent)
        for fom, parent in zip(foms, parents, strict=True)
    ]
    found = against_runner_up(write_run(tmp_path / "run", trials))
    assert (found.best, found.second, found.num_trials, found.kin) == (3, 2, 5, 3)
    alone = against_runner_up(write_run(tmp_path / "alone", trials[:2]))
    assert str(alone) == (
        "t001 is the only trial with a score, but for what it goes on from and what goes on from it"
    )


def test_the_best_was_picked_among_those_of_its_budget(tmp_path):
    less = {"training.epochs": 1}
    trials = [
        Told(point={"a": 0.1}, status=status, settings=settings, foms=[0.5, 0.6])
        for status in ("done", "dropped")
        for settings in ({}, {}, less)
    ]
    assert against_runner_up(write_run(tmp_path / "run", trials)).num_trials == 4


def test_a_summary_has_the_headline_facts_as_plain_values(tmp_path):
    view = View(make_run(tmp_path / "run", Made(num_trials=4, failed=(2,), num_folds=2)))
    seen = summary(view)
    assert json.loads(json.dumps(seen, allow_nan=False)) == seen
    assert seen["trials"] == {"done": 3, "failed": 1}
    assert seen["tasks"] == {"done": 6, "failed": 2}
    assert seen["failures"] == {"diverged": 2}
    assert seen["best"]["score"] == view.trials["score"].min()
    assert seen["node_hours"] == node_hours(view.ledger, 0.25)
    assert (seen["running"], seen["started"], seen["site"]) == (False, BEGIN, "local")
    assert 0.3 < seen["utilisation"] < 1
