"""How the speed of a training grows with its ranks, and where its time goes."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

import pandas as pd

from apps.contract import Layout, Training, batches_of_update, from_dict, ranks_of
from workflow.ledger import BUDGETS
from workflow.space import Point, Real
from workflow.study import Study

PARTS = ("compute", "communication", "data", "idle")
SECONDS = [f"{part}_s" for part in PARTS]
INPUT_BOUND = 0.2  # of the time in training steps

STRATEGY = "training.strategy"
COUNTS = ("num_workers", "ranks_per_worker", "ranks_per_stage", "num_masters")
BATCH = ("training.batch_size", "training.accumulate")
# What the layout and the batch of an update follow from.
DECIDE = (
    "layout.",
    STRATEGY,
    *BATCH,
    "training.lanes",
    "training.exchange.",
    "training.reduction.",
)


def described(tasks: pd.DataFrame, study: Study) -> pd.DataFrame:
    """The tasks that are done, each with its strategy, layout, masters, and batch.

    Args:
        tasks: the ledger's table.

    Returns:
        The table with these columns more: strategy; layout, in words; masters, how many of its
        ranks are some; batch, the events of an update.
    """
    done = tasks[tasks["status"] == "done"]
    names = [name for name in done.columns if name.startswith(DECIDE)]
    points = [
        {str(name): value for name, value in row.items() if pd.notna(value)}
        for row in done[names].to_dict("records")
    ]
    known: dict[
        str, tuple[Training, Layout]
    ] = {}  # there are fewer than tasks, and each takes time
    for point in points:
        if repr(point) not in known:
            known[repr(point)] = _sections(study, point)
    sections = [known[repr(point)] for point in points]
    ranks = [ranks_of(*each) for each in sections]
    return done.assign(
        strategy=[training.strategy for training, _ in sections],
        layout=[str(each) for each in ranks],
        masters=[each.masters for each in ranks],
        batch=[each[0].batch_size * batches_of_update(*each) for each in sections],
    )


def setting_of(done: pd.DataFrame, study: Study) -> list[str]:
    """The columns in which trainings must agree for their speeds to be compared.

    The strategy, and what is searched and may change the speed. Not the layout, and neither real
    numbers, such as learning rates, nor how long is trained. Where all updates are of as many
    events (strong scaling), a rank's part of them goes with the number of ranks.
    """
    left_out = {STRATEGY, *BUDGETS, *(f"layout.{name}" for name in COUNTS)}
    if done["batch"].nunique() == 1:
        left_out.update(BATCH)
    space = study.search.space
    names = (name for name in done.columns if "." in name and name not in left_out)
    return [
        "strategy",
        *(
            name
            for name in names
            if not isinstance(space.get(name), Real) and done[name].nunique(dropna=False) > 1
        ),
    ]


def compared(done: pd.DataFrame, setting: Sequence[str]) -> pd.DataFrame:
    """One row a setting and layout, those with something to compare with first.

    Args:
        done: from `described`.
        setting: the columns that make a setting.

    Returns:
        The setting's columns and layout, num_ranks, masters and batch; samples_per_second, the
        median over tasks; speed_up, against the fewest ranks of the same setting (the fastest of
        such layouts), ideal, which is the ratio of the ranks, and efficiency, speed_up / ideal,
        all NaN where a setting has one number of ranks; and the shares of the time, by `PARTS`.
    """
    groups = done.groupby([*setting, "layout"], sort=False, dropna=False)
    facts = dict.fromkeys(("num_ranks", "masters", "batch"), "first")
    seconds = dict.fromkeys(SECONDS, "sum")
    rows = groups.agg({**facts, "samples_per_second": "median", **seconds}).reset_index()

    ranks, rate = rows["num_ranks"].astype(float), rows["samples_per_second"]
    number = rows.groupby(list(setting), sort=False, dropna=False).ngroup()
    fewest = ranks.groupby(number).transform("min")
    least = rate.where(ranks == fewest).groupby(number).transform("max")
    alone = ranks.groupby(number).transform("nunique") == 1
    rows["ideal"] = (ranks / fewest).mask(alone)
    rows["speed_up"] = (rate / least).mask(alone)
    rows["efficiency"] = rows["speed_up"] / rows["ideal"]
    rows[list(PARTS)] = _shares(rows).to_numpy()

    order = pd.DataFrame({"alone": alone, "number": number, "ranks": ranks})
    sorted_ = order.sort_values(list(order.columns), kind="stable").index
    return rows.loc[sorted_].drop(columns=SECONDS).reset_index(drop=True)


def bars(rows: pd.DataFrame, width: int = 40) -> list[str]:
    """The speed-up of each row as a bar, with a | where it would be ideal."""
    largest = rows[["speed_up", "ideal"]].max().max()
    lines = []
    for speed_up, ideal in zip(rows["speed_up"], rows["ideal"], strict=True):
        mark = round(width * ideal / largest)
        bar = ("█" * round(width * speed_up / largest)).ljust(mark)
        lines.append(f"{bar[:mark]}|{bar[mark:]}")
    return lines


def input_bound(tasks: pd.DataFrame) -> str:
    """How many tasks waited for data for long, in words; empty where none did."""
    waited = _shares(tasks)["data_s"].dropna()
    many = int((waited > INPUT_BOUND).sum())
    if many == 0:
        return ""
    return (
        f"input-bound: {many} of {len(waited)} tasks waited for data more than {INPUT_BOUND:.0%} "
        "of the time (data.memory_gb, data.cache, larger chunks would help)"
    )


def _shares(rows: pd.DataFrame) -> pd.DataFrame:
    """Of the time in training steps; NaN where it was not measured."""
    seconds = rows[SECONDS]
    return seconds.div(seconds.sum(axis=1), axis=0)


def _sections(study: Study, point: Point) -> tuple[Training, Layout]:
    """How a trial trained."""
    sections = ("training", "layout")
    content: Any = {name: dataclasses.asdict(getattr(study, name)) for name in sections}
    for path, value in point.items():
        *parents, last = path.split(".")
        functools.reduce(operator.getitem, parents, content)[last] = value
    return from_dict(Training, content["training"]), from_dict(Layout, content["layout"])
