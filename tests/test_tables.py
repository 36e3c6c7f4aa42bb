"""The ledger's tables: what the documents say of them, and histories of many tasks at once."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pandas as pd
import pytest
from made_runs import Made, make_run

from apps.contract import N3LOError
from workflow import Ledger, tables

PAGE = Path(__file__).resolve().parent.parent / "docs" / "ledger.md"
SHOWN = {
    tables.PARAMETERS: "*dotted paths*",
    tables.METRICS: "*metrics*",
    tables.SEARCH: "*of the search*",
}


@pytest.fixture
def folder(tmp_path) -> Path:
    return make_run(tmp_path / "run", Made(num_trials=6, failed=(1,), running=(5,)))


def documented(columns: tuple[tables.Column, ...]) -> str:
    rows = [
        f"| {SHOWN.get(each.name, each.name)} | {each.dtype or 'by value'} | {each.unit} "
        f"| {each.meaning} |"
        for each in columns
    ]
    return "\n".join(["| column | type | unit | meaning |", "|---|---|---|---|", *rows])


@pytest.mark.parametrize("name", tables.TABLES)
def test_the_page_on_the_ledger_has_all_columns_as_they_are(name):
    """`N3LO_GOLDEN=write pytest tests/test_tables.py` writes them anew."""
    begin, end = f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"
    text = PAGE.read_text()
    before, _, rest = text.partition(begin)
    there, _, after = rest.partition(end)
    if os.environ.get("N3LO_GOLDEN") == "write":
        PAGE.write_text(before + begin + documented(tables.TABLES[name]) + end + after)
    else:
        assert there == documented(tables.TABLES[name])


@pytest.mark.parametrize("name", ["tasks", "attempts", "history"])
def test_a_table_has_the_columns_of_the_page_in_that_order_and_of_those_types(folder, name):
    frame = getattr(Ledger(folder), name)()
    columns = [each for each in tables.TABLES[name] if each.name in frame]
    there = [column for column in frame.columns if column in {each.name for each in columns}]
    assert there == [each.name for each in columns]
    assert [str(frame[each.name].dtype) for each in columns] == [each.dtype for each in columns]
    assert len(columns) == sum(not each.name.startswith("*") for each in tables.TABLES[name])


def test_the_history_of_all_tasks_is_that_of_each_below_the_other(folder):
    ledger = Ledger(folder)
    history = ledger.history()
    assert len(history) == 5 * 3 * 10 + 3 * 5  # the last trial is in the middle of its ten epochs
    for (trial, fold), rows in history.groupby(["trial", "fold"]):
        lines = (folder / f"t{trial:03d}-f{fold}" / "history.jsonl").read_text().splitlines()
        assert rows["val_loss"].tolist() == [json.loads(line)["val_loss"] for line in lines]
    assert ledger.history(trial=2, fold=1)["epoch"].tolist() == list(range(1, 11))
    assert set(ledger.history(trial=2)["fold"]) == {0, 1, 2}


def test_a_torn_line_a_missing_file_and_nan_cost_nothing_but_themselves(folder):
    whole = Ledger(folder).history()
    with open(folder / "t000-f0" / "history.jsonl", "a") as file:
        file.write('{"epoch": 11, "val_l')  # it is being written
    (folder / "t000-f1" / "history.jsonl").unlink()
    diverged = folder / "t001-f0" / "history.jsonl"
    diverged.write_text('{"epoch": 1, "val_loss": NaN}\n{"epoch"\n{"epoch": 3, "val_loss": 0.5}\n')
    history = Ledger(folder).history()
    counts = history.groupby(["trial", "fold"]).size()
    assert counts[0, 0] == 10
    assert (0, 1) not in counts.index
    rows = history[(history["trial"] == 1) & (history["fold"] == 0)]
    assert rows["epoch"].tolist() == [1, 3]
    assert math.isnan(rows["val_loss"].iloc[0])
    others = [(2, 0), (2, 1), (5, 2)]
    for task in others:
        pd.testing.assert_frame_equal(of(history, task), of(whole, task))


def of(history: pd.DataFrame, task: tuple[int, int]) -> pd.DataFrame:
    rows = history[(history["trial"] == task[0]) & (history["fold"] == task[1])]
    return rows.reset_index(drop=True)


def test_a_run_without_any_epoch_has_an_empty_history_with_its_first_columns(tmp_path):
    folder = make_run(tmp_path / "run", Made(num_trials=1, epochs=1, running=(0,)))
    history = Ledger(folder).history()
    assert (len(history), list(history.columns)) == (0, ["trial", "fold", "epoch"])


def test_the_tables_of_a_folder_without_a_ledger_say_so(tmp_path):
    for name in ("tasks", "trials", "attempts", "history"):
        with pytest.raises(N3LOError, match=f"there is no ledger in '{tmp_path}'"):
            getattr(Ledger(tmp_path), name)()


def test_a_ledger_reads_on_where_it_was_and_leaves_a_row_that_is_being_written(folder):
    rows = (folder / "ledger.jsonl").read_bytes()
    cut = rows.rfind(b"\n", 0, len(rows) - 1) - 20  # in the middle of a row
    (folder / "ledger.jsonl").write_bytes(rows[:cut])
    ledger = Ledger(folder)
    assert ledger.refresh() is False
    with open(folder / "ledger.jsonl", "ab") as file:
        file.write(rows[cut:])
    assert ledger.refresh() is True
    again = Ledger(folder)
    for name in ("tasks", "trials", "attempts"):
        pd.testing.assert_frame_equal(getattr(ledger, name)(), getattr(again, name)())


def test_a_ledger_that_another_took_the_place_of_is_read_from_its_beginning(folder, tmp_path):
    ledger = Ledger(folder)
    other = make_run(tmp_path / "other", Made(num_trials=2, num_folds=1))
    (folder / "ledger.jsonl").write_bytes((other / "ledger.jsonl").read_bytes())
    assert ledger.refresh() is True
    assert len(ledger.tasks()) == 2


def test_every_attempt_at_a_task_is_a_row_also_those_whose_driver_ended(folder):
    lines = (folder / "ledger.jsonl").read_text().splitlines()
    again = json.loads(lines[0]) | {"time": 1_790_009_000.0}
    start = {
        "event": "start",
        "trial": 5,
        "fold": 0,
        "attempt": 2,
        "key": "k",
        "time": 1_790_009_001.0,
    }
    with open(folder / "ledger.jsonl", "a") as file:
        file.write(json.dumps(again) + "\n" + json.dumps(start) + "\n")
    attempts = Ledger(folder).attempts()
    mine = attempts[(attempts["trial"] == 5) & (attempts["fold"] == 0)]
    assert mine[["attempt", "status"]].to_numpy().tolist() == [[1, "lost"], [2, "lost"]]
    assert mine["ended"].iloc[0].timestamp() < 1_790_009_000  # with the last row of its driver
    assert attempts["status"].value_counts().to_dict() == {
        "done": 12, "failed": 3, "lost": 4,
    }  # fmt: skip
