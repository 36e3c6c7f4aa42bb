"""A run in a notebook, while it goes on or afterwards: JupyterLab, VS Code, or a page by Voila.

from workflow.monitor import watch
watch("runs/jets")
"""

from __future__ import annotations

import html
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import ipywidgets
import pandas as pd
import plotly.graph_objects as go
from itables.widget import ITable
from threadpoolctl import threadpool_limits

from apps.contract import N3LOError
from workflow.best import summary
from workflow.console import short_names
from workflow.figures import machine, search, training
from workflow.figures.style import PALE, STATUS, empty
from workflow.ledger import NAME
from workflow.page import in_words
from workflow.surrogate import Surrogate
from workflow.view import View
from workflow.widgets import Library, Plot

EVERY_S = 2.0
DIGITS = 4
TABLE_BYTES = 4_000_000  # of a table's rows that are sent to the browser
_watching: dict[Path, Monitor] = {}


def watch(folder: str | Path = "runs", every_s: float = EVERY_S) -> Monitor | Chooser:
    """Show a run, and refresh it in the background until `stop()`; the run is only read.

    Args:
        folder: of a run; or of several, of which one can then be chosen.
        every_s: seconds between two looks at it.

    Raises:
        N3LOError: there is no run.
    """
    folder = Path(folder).expanduser()
    if (folder / NAME).exists():
        return _monitor(folder, every_s)
    runs = sorted(path.parent for path in folder.glob(f"*/{NAME}"))
    if not runs:
        raise N3LOError(f"there is no run in '{folder.resolve()}'")
    return Chooser(runs, every_s)


def _monitor(folder: Path, every_s: float) -> Monitor:
    """In place of an earlier one of this folder: a cell that runs again leaves none behind."""
    monitor = Monitor(View(folder), every_s)
    earlier = _watching.get(folder.resolve())
    if earlier is not None:
        earlier.stop()
    _watching[folder.resolve()] = monitor
    monitor.start()
    return monitor


class Chooser(ipywidgets.VBox):  # type: ignore[misc]  # ipywidgets has no type information
    """One of several runs, at first the one that was written to last."""

    def __init__(self, runs: Sequence[Path], every_s: float = EVERY_S) -> None:
        self.every_s = every_s
        latest = max(runs, key=lambda run: (run / NAME).stat().st_mtime)
        self.choice = ipywidgets.Dropdown(
            options=[(run.name, run) for run in runs], value=latest, description="run"
        )
        self.choice.observe(lambda change: self.show(change["new"]), "value")
        self.monitor = _monitor(latest, every_s)
        super().__init__([self.choice, self.monitor])

    def show(self, run: Path) -> None:
        """Watch another run."""
        try:
            chosen = _monitor(run, self.every_s)
        except N3LOError as error:
            self.children = [self.choice, ipywidgets.HTML(f"<p>{html.escape(str(error))}</p>")]
            return
        self.monitor.stop()
        self.monitor = chosen
        self.children = [self.choice, self.monitor]

    @property
    def view(self) -> View:
        """Of the run that is shown."""
        return self.monitor.view

    def stop(self) -> None:
        """Leave the picture as it is."""
        self.monitor.stop()


class Monitor(ipywidgets.VBox):  # type: ignore[misc]  # ipywidgets has no type information
    """All about a run, in tabs; what is not looked at is not drawn."""

    def __init__(self, view: View, every_s: float = EVERY_S) -> None:
        self.view = view
        self.every_s = every_s
        self.headline = ipywidgets.HTML()
        self.tabs = [kind(self.draw) for kind in (_Overview, _Trials, _Space, _Machine, _Failures)]
        self.book = ipywidgets.Tab([tab.box for tab in self.tabs])
        self.book.titles = [tab.title for tab in self.tabs]
        self.book.observe(lambda _: self.draw(), "selected_index")
        self._turn = threading.RLock()  # of the kernel, where menus are, or of the background
        self._is_drawing = False
        self._stopped = threading.Event()
        super().__init__([Library(), self.headline, self.book])
        self.draw()

    def draw(self) -> None:
        """Draw the headline and the tab that is open."""
        with self._turn:
            if self._is_drawing:  # a menu was filled, which is no choice of the user's
                return
            self._is_drawing = True
            try:
                self.headline.value = _headline(self.view)
                self.tabs[self.book.selected_index or 0].draw(self.view)
            finally:
                self._is_drawing = False

    def refresh(self, anyway: bool = False) -> None:
        """Read what a driver has added, and draw it.

        Args:
            anyway: draw though nothing has changed.
        """
        with self._turn:
            if self.view.refresh() or self.view.is_running or anyway:
                self.draw()

    def start(self) -> None:
        """Refresh in the background, until `stop`; the kernel stays free."""
        threading.Thread(target=self._go_on, name="n3lo-watch", daemon=True).start()

    def stop(self) -> None:
        """Leave the picture as it is."""
        self._stopped.set()

    def _go_on(self) -> None:
        has_failed = False
        while not self._stopped.wait(self.every_s):
            try:
                self.refresh(anyway=has_failed)
                has_failed = False
            except Exception as error:  # noqa: BLE001  the next look may be better than none
                has_failed = True
                said = html.escape(f"{type(error).__name__}: {error}")
                self.headline.value = f"<p><b>not refreshed</b> at {_clock()}: {said}</p>"


# -- the tabs --------------------------------------------------------------------------------------


class _Tab:
    """A page of the book; its parts are made when it is first opened."""

    title = ""

    def __init__(self, redraw: Callable[[], None]) -> None:
        """
        Args:
            redraw: what a choice of the user's asks for.
        """
        self.redraw = redraw
        self.box = ipywidgets.VBox()

    def draw(self, view: View) -> None:
        if not self.box.children:
            self.box.children = self.parts(view)
        self.fill(view)

    def parts(self, view: View) -> Sequence[ipywidgets.Widget]:
        raise NotImplementedError

    def fill(self, view: View) -> None:
        raise NotImplementedError

    def menu(self, description: str = "") -> ipywidgets.Dropdown:
        menu = ipywidgets.Dropdown(options=[], description=description)
        menu.observe(lambda _: self.redraw(), "value")
        return menu


class _Overview(_Tab):
    title = "Overview"

    def parts(self, view: View) -> Sequence[ipywidgets.Widget]:
        self.convergence, self.curves = Plot(), Plot()
        self.metric = self.menu("curves of")
        return [self.convergence, self.metric, self.curves]

    def fill(self, view: View) -> None:
        self.convergence.draw(search.convergence(view))
        _offer(self.metric, training.curve_metrics(view) or [view.metric], view.metric)
        curves = training.learning_curves(view, self.metric.value)
        self.curves.draw(curves.update_layout(uirevision=self.metric.value))


class _Trials(_Tab):
    title = "Trials"

    def parts(self, view: View) -> Sequence[ipywidgets.Widget]:
        self.table, self.parallel = _sortable(), Plot()
        return [self.table, self.parallel]

    def fill(self, view: View) -> None:
        _show(self.table, _trials_shown(view))
        self.parallel.draw(search.parallel(view, _surrogate(view)))


class _Space(_Tab):
    title = "Search space"

    def parts(self, view: View) -> Sequence[ipywidgets.Widget]:
        self.importances, self.slices, self.contour, self.front = Plot(), Plot(), Plot(), Plot()
        self.axes = [self.menu("over"), self.menu("and")]
        shown = [self.importances, self.slices, ipywidgets.HBox(self.axes), self.contour]
        return [*shown, self.front] if view.ledger.scoring.further else shown

    def fill(self, view: View) -> None:
        surrogate = _surrogate(view)
        self.importances.draw(search.importances(surrogate))
        self.slices.draw(search.slices(view, surrogate))
        paths = list(view.file.space.dimensions)
        names = list(zip(short_names(paths), paths, strict=True))
        first = paths if surrogate is None else surrogate.most_important(len(paths))
        for axis, path in zip(self.axes, first, strict=False):
            _offer(axis, names, path)
        x, y = (axis.value for axis in self.axes)
        if x == y or y is None:
            contour = empty("Predicted score over two dimensions", "choose two that differ")
        else:
            contour = search.contour(view, surrogate, x, y)
        self.contour.draw(contour.update_layout(uirevision=f"{x} {y}"))
        if view.ledger.scoring.further:
            self.front.draw(search.front(view))


class _Machine(_Tab):
    title = "Machine"

    def parts(self, view: View) -> Sequence[ipywidgets.Widget]:
        self.plots: list[tuple[Plot, Callable[[View], go.Figure]]] = [
            (Plot(), machine.timeline),
            (Plot(), training.scaling),
            (Plot(), machine.cost),
        ]
        return [plot for plot, _ in self.plots]

    def fill(self, view: View) -> None:
        for plot, figure in self.plots:
            plot.draw(figure(view))


class _Failures(_Tab):
    title = "Failures"

    def parts(self, view: View) -> Sequence[ipywidgets.Widget]:
        self.counts, self.table = Plot(), _sortable()
        self.log = ipywidgets.HTML()
        self.task = self.menu("log of")
        return [self.counts, self.table, self.task, self.log]

    def fill(self, view: View) -> None:
        failures = machine.failures(view)
        self.counts.draw(machine.failure_counts(view))
        _show(self.table, failures)
        logs = dict(zip(failures["task"], failures["log"], strict=True))
        _offer(self.task, list(logs), next(iter(logs), None))
        log = machine.log_end(Path(logs[self.task.value])) if logs else ""
        self.log.value = f"<pre>{html.escape(log)}</pre>"


# -- pieces ----------------------------------------------------------------------------------------


def _surrogate(view: View) -> Surrogate | None:
    """Of the trials that have a score now; made once for them, and for each start's space."""
    stamp = (len(view.ledger.sessions), *view.best_first["trial"])
    known = _surrogates.get(view)
    if known is None or known[0] != stamp:
        with threadpool_limits(1):  # threads that fight for a core take ten times as long
            known = _surrogates[view] = (stamp, Surrogate.of(view))
    return known[1]


_surrogates: WeakKeyDictionary[View, tuple[tuple[int, ...], Surrogate | None]] = WeakKeyDictionary()


def _trials_shown(view: View) -> pd.DataFrame:
    """The trials' table as people read it: the best first, short names, four digits."""
    trials = view.ranked.dropna(axis="columns", how="all")
    names = [str(name) for name in trials.columns]
    return _rounded(trials).set_axis(short_names(names), axis="columns")


def _rounded(table: pd.DataFrame) -> pd.DataFrame:
    numbers = table.select_dtypes("float64").columns
    digits = {name: table[name].map(lambda value: float(f"{value:.{DIGITS}g}")) for name in numbers}
    return table.assign(**digits)


def _offer(menu: ipywidgets.Dropdown, options: Sequence[Any], first: Any) -> None:
    """Fill a menu; what the user has chosen stays chosen as long as it is there.

    Args:
        options: values, or pairs of a name and a value.
        first: what is chosen until then.
    """
    if list(menu.options) == list(options):
        return
    values = [each[1] if isinstance(each, tuple) else each for each in options]
    chosen = menu.value if menu.value in values else first
    menu.options = options
    menu.value = chosen if chosen in values else None


def _sortable() -> ITable:
    return ITable(pd.DataFrame({"": []}), maxBytes=TABLE_BYTES, showIndex=False, order=[])


def _show(table: ITable, rows: pd.DataFrame) -> None:
    if table.df is None or not rows.equals(table.df):
        table.update(rows)


def _headline(view: View) -> str:
    """How far it is, as a bar and in words."""
    facts = summary(view)
    tasks = facts["tasks"]
    folds = view.file.study.data.folds
    total = max(sum(tasks.values()), view.num_trials * folds, 1)
    bar = "".join(
        f'<div style="width:{100 * tasks[status] / total:.2f}%;background:{colour}" '
        f'title="{tasks[status]} {status}"></div>'
        for status, colour in STATUS.items()
        if tasks.get(status)
    )
    said = [f"{name}: {html.escape(text)}" for name, text in in_words(facts).items()]
    return (
        f'<div style="display:flex;height:14px;background:{PALE}">{bar}</div>'
        f'<p class="n3lo-headline"><b>{html.escape(facts["name"])}</b>: {"; ".join(said)}'
        f" <small>(seen at {_clock()})</small></p>"
    )


def _clock() -> str:
    return time.strftime("%H:%M:%S")
