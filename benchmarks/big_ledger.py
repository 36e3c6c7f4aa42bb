"""How fast a large ledger is looked at: opening it, refreshing it, drawing it, and memory.

    python benchmarks/big_ledger.py            # 10,000 tasks, 1,000,000 lines of histories

Makes the run folder in a temporary place (tests/made_runs.py), and prints a table of seconds, each
the median of `--repeat`; the first reading is from the page cache, as it was just written.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from made_runs import Made, make_run

from workflow import page
from workflow.monitor import Monitor
from workflow.view import View


def seconds(does: Callable[[], object], repeat: int) -> float:
    taken = []
    for _ in range(repeat):
        start = time.perf_counter()
        does()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    made = Made(
        num_trials=options.trials,
        num_folds=options.folds,
        epochs=options.epochs,
        num_slots=64,
        failed=tuple(range(0, options.trials, 50)),
    )
    machine = f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}"
    print(f"{machine}, Python {platform.python_version()}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = make_run(Path(temporary) / "large", made)
        size = (folder / "ledger.jsonl").stat().st_size / 1e6
        tasks = options.trials * options.folds
        print(f"{tasks} tasks, {tasks * options.epochs} lines of histories, ledger {size:.0f} MB")
        print(f"{seconds(lambda: View(folder).tasks, options.repeat):6.2f} s  open, tasks table")
        monitor = Monitor(View(folder))
        print(
            f"{seconds(_refreshing(monitor, folder), options.repeat):6.2f} s  refresh after a row"
        )
        print(f"{seconds(lambda: monitor.refresh(), options.repeat):6.2f} s  refresh without one")
        for place, tab in enumerate(monitor.tabs):
            first = seconds(lambda at=place: setattr(monitor.book, "selected_index", at), 1)
            again = seconds(monitor.draw, options.repeat)
            print(f"{again:6.2f} s  tab '{tab.title}' ({first:.2f} s when it is opened)")
        print(f"{seconds(View(folder).ledger.history, 1):6.2f} s  history of all tasks as a table")
        report = Path(temporary) / "report.html"
        print(f"{seconds(lambda: page.write_page(View(folder), report), 1):6.2f} s  report")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    print(f"{peak:6.0f} MB at most")


def _refreshing(monitor: Monitor, folder: Path) -> Callable[[], None]:
    """A task's end is added, as a driver does, and seen."""
    rows = (folder / "ledger.jsonl").read_text().splitlines()
    row = next(text for text in reversed(rows) if json.loads(text)["event"] == "end")

    def refresh() -> None:
        with open(folder / "ledger.jsonl", "a") as ledger:
            ledger.write(row + "\n")
        monitor.refresh()

    return refresh


if __name__ == "__main__":
    main()
