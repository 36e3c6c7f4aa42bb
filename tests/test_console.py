"""What a driver shows, in a terminal and elsewhere."""

from __future__ import annotations

import io

import pandas as pd
from rich.console import Console as Terminal
from test_ledger import FINGERPRINT, finish

from apps.contract import Objective
from workflow.console import Console, by_score, score_text, short_names
from workflow.ledger import Ledger, session_facts
from workflow.search import Proposal


def test_a_terminal_shows_how_far_the_study_is_and_its_best_trial(tmp_path):
    ledger = Ledger(tmp_path)
    ledger.record_session(**session_facts(FINGERPRINT, site="local"))
    for trial, fom in enumerate((0.4, 0.2)):
        ledger.record_trial(Proposal({"training.optimizer.lr": 0.01}, number=trial), num_folds=2)
        finish(ledger, trial, 0, fom)
    finish(ledger, 1, 1, 0.4)
    screen = io.StringIO()
    shown = Console(
        Objective(metric="val_loss", goal="min"), num_trials=5, num_folds=2, num_slots=1,
        terminal=Terminal(file=screen, force_terminal=True, width=120),
    )  # fmt: skip
    with shown.showing():
        shown.refresh(ledger)
    said = screen.getvalue()
    assert "2/5 trials | 3/10 tasks done" in said
    assert "best val_loss 0.3 ± 0.14 (t001)" in said
    assert "lr" in said


def test_what_is_no_terminal_gets_no_table(tmp_path):
    screen = io.StringIO()
    shown = Console(Objective(goal="min"), 5, 2, 1, terminal=Terminal(file=screen))
    with shown.showing():
        shown.refresh(Ledger(tmp_path))
    assert screen.getvalue() == ""


def test_the_best_trial_is_first_and_those_without_a_score_are_last():
    trials = pd.DataFrame({"trial": [0, 1, 2], "score": [0.3, float("nan"), 0.1]})
    assert list(by_score(trials, "min")["trial"]) == [2, 0, 1]
    assert list(by_score(trials, "max")["trial"]) == [0, 2, 1]


def test_a_parameter_is_named_by_its_last_part_unless_that_is_ambiguous():
    assert short_names(["model.args.width", "training.optimizer.lr"]) == ["width", "lr"]
    assert short_names(["a.lr", "b.lr"]) == ["a.lr", "b.lr"]


def test_a_score_without_folds_has_no_spread():
    assert score_text(0.5, float("nan")) == "0.5"
    assert score_text(0.5, 0.01) == "0.5 ± 0.01"
    assert score_text(float("nan"), float("nan")) == "-"
