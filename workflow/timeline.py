"""Who ran where and when: the attempts at tasks, on the lanes of their nodes, and how busy it was.

A lane is the room of one task on one node, as a track in a station: a node has as many of them as
tasks ran on it at once, and a task over several nodes has a lane on each.
"""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from workflow.view import View

# The driver hears of an end a little after the room is free, and the next task may be in it by
# then: so much of an attempt's end, in seconds and as a part of it, is not held against the next.
LAG_S, LAG_PART = 1.0, 0.1
LEAST_S = 1e-3  # less is rounding
UNKNOWN = "unknown node"

_OF_ATTEMPTS = ["trial", "fold", "attempt", "status", "reason", "message", "job"]


@dataclass(frozen=True)
class Timeline:
    """The attempts of a run on lanes, and the sessions of its drivers."""

    bars: pd.DataFrame  # as `work`, with `node` and `lane`; one row an attempt and node
    lanes: list[str]  # the node of each lane
    sessions: list[tuple[float, float]]  # in which drivers were at work, Unix seconds
    utilisation: float  # of the slots, while drivers were at work; NaN before anything has run


def timeline(view: View) -> Timeline:
    """What ran when and where.

    The utilisation is the time for which tasks ran, over that for which there were slots for them:
    as many as the session says, or as tasks ran at once.
    """
    attempts = work(view)
    begun, ended = attempts["begun"].to_numpy(), attempts["ended"].to_numpy()
    left = ended - np.minimum(LAG_S, LAG_PART * (ended - begun))
    sessions = sessions_of(view)
    slots = [row.get("num_slots") or 0 for row in view.ledger.sessions]

    bars = attempts.assign(left=left, lane=0, node=attempts["nodes"])
    bars = bars.explode("node", ignore_index=True)
    counts: dict[str, int] = {}  # lanes of each node
    for node in sorted(bars["node"].unique(), key=_in_numbers):
        here = bars[bars["node"] == node]
        colours = coloured(here["begun"].to_numpy(), here["left"].to_numpy())
        bars.loc[here.index, "lane"] = colours
        counts[node] = max(colours) + 1
    counts = _with_idle(counts, slots[-1], view.node_share)
    first = dict(zip(counts, np.cumsum([0, *counts.values()]).tolist(), strict=False))
    bars["lane"] += bars["node"].map(first).astype(int)
    return Timeline(
        bars=bars.drop(columns="left"),
        lanes=[node for node, count in counts.items() for _ in range(count)],
        sessions=sessions,
        utilisation=_utilisation(np.stack([begun, ended, left]), sessions, slots),
    )


def sessions_of(view: View) -> list[tuple[float, float]]:
    """The begin and end of each session of a driver, Unix seconds; one at work ends now."""
    spans = list(view.ledger.spans)
    if view.is_running:
        spans[-1] = (spans[-1][0], max(spans[-1][1], view.read_at))
    return spans


def work(view: View) -> pd.DataFrame:
    """The attempts of which it is known that they ran, and when; not those that only waited.

    Older versions have not written when an attempt began: it has then occupied its room for what
    the ledger counts.

    Returns:
        trial, fold, attempt, status, reason, message, job as in the ledger's table; nodes, a tuple;
        begun and ended, Unix seconds; fate, see `fates_of`; node_hours.
    """
    attempts = view.attempts
    rows = attempts[_OF_ATTEMPTS].copy()
    begun, ended, submitted = (_unix(attempts[name]) for name in ("begun", "ended", "submitted"))
    tasks = list(zip(rows["trial"].tolist(), rows["fold"].tolist(), strict=True))
    states = [view.ledger.trials_by_number[trial].tasks[fold] for trial, fold in tasks]
    groups = [rows["trial"].astype(int), rows["fold"].astype(int)]

    has_begun = begun > submitted
    is_counted = has_begun & rows["status"].isin(["done", "failed"])
    counted_s = (ended - begun).where(is_counted, 0.0).groupby(groups).transform("sum")
    is_dateless = ~has_begun & (rows["status"] == "done")
    number = is_dateless.groupby(groups).transform("sum").clip(lower=1)
    occupied_s = pd.Series([state.occupied_s for state in states], rows.index, dtype=float)
    rest_s = (occupied_s - counted_s) / number
    is_dateless &= rest_s > LEAST_S  # what the cache had has occupied nothing

    rows["begun"] = begun.where(~is_dateless, ended - rest_s)
    rows["ended"] = np.maximum(ended, rows["begun"])
    hosts = [state.result.get("hosts", []) for state in states]
    rows["nodes"] = [
        tuple(dict.fromkeys(host.split(",") if host else of_result)) or (UNKNOWN,)
        for host, of_result in zip(attempts["host"], hosts, strict=True)
    ]
    rows["fate"] = fates_of(attempts)
    rows["node_hours"] = (rows["ended"] - rows["begun"]) * view.node_share / 3600
    return rows[has_begun | is_dateless].reset_index(drop=True)


def fates_of(attempts: pd.DataFrame) -> pd.Series[str]:
    """What became of attempts: their status, but "lost" for all that the task may get over.

    So for one that the end of a batch job cut off, and one that failed and was tried again.
    """
    is_last = ~attempts.duplicated(["trial", "fold"], keep="last")
    is_cut_off = (attempts["status"] == "failed") & (~is_last | (attempts["reason"] == "walltime"))
    fates: pd.Series[str] = attempts["status"].mask(is_cut_off, "lost")
    return fates


def coloured(begun: Sequence[float] | np.ndarray, left: Sequence[float] | np.ndarray) -> list[int]:
    """A lane for each interval, so that no two in one overlap; as few lanes as can be, the first
    free one each time.
    """
    lanes = [0] * len(begun)
    busy: list[tuple[float, int]] = []  # until when, which
    free: list[int] = []
    for index in np.argsort(begun, kind="stable").tolist():
        while busy and busy[0][0] <= begun[index]:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lane = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (left[index], lane))
        lanes[index] = lane
    return lanes


def most_at_once(begun: np.ndarray, left: np.ndarray) -> int:
    """How many intervals overlap at the most."""
    if not len(begun):
        return 0
    changes = np.repeat([1, -1], len(begun))
    order = np.lexsort((changes, np.concatenate([begun, left])))  # those that leave go first
    return int(np.cumsum(changes[order]).max())


def _utilisation(
    times: np.ndarray, sessions: list[tuple[float, float]], slots: Sequence[int]
) -> float:
    """See `timeline`.

    Args:
        times: (3, attempts), begun, ended, and when their room was free again.
        slots: of each session; 0 where they are not known.
    """
    busy_s = room_s = 0.0
    for (first, last), known in zip(sessions, slots, strict=True):
        begun, ended, left = np.clip(times, first, last)
        ran = ended > begun
        busy_s += float((ended - begun)[ran].sum())
        room_s += (last - first) * max(known, most_at_once(begun[ran], left[ran]))
    return min(busy_s / room_s, 1.0) if busy_s else math.nan


def _with_idle(counts: dict[str, int], slots: int, node_share: float) -> dict[str, int]:
    """The lanes of each node, with those on which nothing ran yet, up to the number of slots."""
    room = max(round(1 / node_share), 1)  # of a node
    counts = dict(counts)
    for _ in range(slots * max(round(node_share), 1) - sum(counts.values())):
        emptiest = min(counts, key=counts.__getitem__, default=None)
        if emptiest is None or counts[emptiest] >= room:
            break
        counts[emptiest] += 1
    return counts


def _unix(times: pd.Series[pd.Timestamp]) -> pd.Series[float]:
    seconds: pd.Series[float] = (times - pd.Timestamp(0, tz="UTC")).dt.total_seconds()
    return seconds


def _in_numbers(name: str) -> list[tuple[int, str]]:
    """Sorts node2 before node10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
