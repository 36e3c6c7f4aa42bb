"""N3LO from Python, such as a notebook: all that the command does, with the same words.

from workflow import Study

study = Study("jets.toml")
study.run(settings={"cores": 4})
study.trials().sort_values("score")
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pandas as pd

from apps.contract import N3LOError, Plain
from sites import get
from sites.base import Site
from sites.settings import user_folder
from workflow import commands, console, init, look, process, runfolder, schema, session, toml, whole
from workflow.arguments import Files, Pair, Several, Trial, Trials, Whole, checked
from workflow.ledger import Ledger
from workflow.study import BUDGET, load, parse
from workflow.view import View

WRITTEN = "# Written by Study.from_dict"  # over a file of ours, which may be written anew


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, or the stop button of a notebook, has ended a run."""

    def _render_traceback_(self) -> list[str]:
        return [f"n3lo: {self}"]


class Study:
    """A study file, and the run that comes of it.

    What a user can mend is an `N3LOError` or a `SiteError`, with the line that the command prints.
    A trial is given by its number or its name: 3 or "t003".
    """

    @checked
    def __init__(
        self,
        path: str | Path,
        values: Mapping[str, Plain] | None = None,
        runs: str | Path = "runs",
    ) -> None:
        """
        Args:
            path: the TOML file.
            values: dotted path -> value, in place of what the file says; see `set`.
            runs: the folder of the run folders and the cache.

        Raises:
            N3LOError: the file or a value is wrong.
        """
        self.path, self.runs = Path(path).expanduser(), Path(runs).expanduser()
        self.values: dict[str, Plain] = {}
        self.set(values or {})

    @classmethod
    @checked
    def from_dict(
        cls, content: Mapping[str, Any], to: str | Path | None = None, runs: str | Path = "runs"
    ) -> Study:
        """A study from nested dicts, which are written to a file: a later session goes on with it.

        Args:
            content: by section, as in a study file.
            to: the file (default: NAME.toml). An earlier one of this kind is replaced.

        Raises:
            N3LOError: a value is wrong, or `to` was written by another.
        """
        path = Path(to or f"{content.get('name', 'study')}.toml").expanduser()
        text = f"#:schema ./{schema.NAME}\n{WRITTEN}\n{toml.text(content)}"
        parse(text, path)
        if path.exists() and WRITTEN not in path.read_text(encoding="utf-8", errors="replace"):
            raise N3LOError(f"'{path}' was not written by Study.from_dict, and is left as it is")
        whole.write_whole(path, text)
        schema.write_beside(path)
        return cls(path, runs=runs)

    @classmethod
    @checked
    def init(
        cls,
        model: str,
        *data: str,
        to: str | Path = "study.toml",
        runs: str | Path = "runs",
        **found: Any,
    ) -> Study:
        """The first study of a model and its data, as `n3lo init` writes it.

        Args:
            model: "my_model.py", "my_model.py:Name" or "package.module:Name".
            data: files or patterns.
            to: the file, which must not be there.
            found: args (of the model), inputs and targets, in place of what would be found out.

        Raises:
            N3LOError: nothing in the data fits the model, or the file is there.
        """
        for name in ("inputs", "targets"):
            if isinstance(found.get(name), str):
                found[name] = [found[name]]
        wanted = init.Wanted(model=model, data=data, **found)
        path, folder = Path(to).expanduser(), Path(runs).expanduser()
        with _in_lines(folder):
            for line in init.write(wanted, path, folder):
                print(line)
        return cls(path, runs=folder)

    @checked
    def set(self, values: Mapping[str, Plain]) -> None:
        """Replace values of the study by their dotted paths, as in {"training.epochs": 3}.

        A part that has dots is in quotes: 'search.space."training.optimizer.lr".high'. A whole
        section, {"training": {"epochs": 3}}, replaces the keys that it names; a table further in
        is replaced whole. None leaves out what the file says, for the default. A run keeps what it
        began with, but for its search: other changes need another "name".

        Raises:
            N3LOError: a value is wrong; then all stays as it was.
        """
        new = {name: _as_read(name, each) for name, each in values.items()}
        kept = {name: each for name, each in self.values.items() if name not in new}
        self.file = load(self.path, {**kept, **new})  # the last to be set is the last to be put
        self.values = dict(self.file.replaced)

    def __repr__(self) -> str:
        changed = f", {self.values}" if self.values else ""
        return f"Study({str(self.path)!r}{changed})"

    # -- before and during a run -------------------------------------------------------------------

    @checked
    def check(self, site: str = "local", settings: Mapping[str, Plain] | None = None) -> list[str]:
        """See that the study can run, its model and data included; return warnings.

        Raises:
            N3LOError, SiteError: it cannot.
        """
        with _in_lines(self.runs):
            ready = session.prepared(self.file, self._site(site, settings), self.runs)
            return [str(each) for each in ready.checked["warnings"]]

    @checked
    def plan(self, site: str = "local", settings: Mapping[str, Plain] | None = None) -> None:
        """Print trials, tasks and launch lines; run nothing.

        Raises:
            N3LOError, SiteError: it cannot run.
        """
        with _in_lines(self.runs):
            session.print_plan(self.file, self._site(site, settings), self.runs)

    @checked
    def run(
        self,
        site: str = "local",
        settings: Mapping[str, Plain] | None = None,
        *,
        trials: Whole | None = None,
        parallel: Whole | None = None,
    ) -> Ledger:
        """Run the study, or go on with it, and show how it gets on.

        It may be called in any thread, for one study at a time in a process.

        Args:
            site: of those that `n3lo sites list` shows.
            settings: of the site, such as {"cores": 2}.
            trials: in place of search.num_trials.
            parallel: in place of search.num_parallel.

        Raises:
            N3LOError, SiteError: something is to be mended; what finished is kept.
            Interrupted: by Ctrl-C or the stop button; what finished is kept, and the next call
                goes on.
        """
        return self._drive((site, settings), (trials, parallel), [])

    @checked
    def rerun(
        self,
        trials: Trials,
        site: str = "local",
        settings: Mapping[str, Plain] | None = None,
    ) -> Ledger:
        """Forget the results of these trials, or of one, and `run`."""
        return self._drive((site, settings), (None, None), trials)

    def _drive(
        self,
        where: tuple[str, Mapping[str, Plain] | None],
        budget: tuple[int | None, int | None],
        rerun: Sequence[int],
    ) -> Ledger:
        given = {name: each for name, each in zip(BUDGET, budget, strict=True) if each is not None}
        file = load(self.path, {**self.values, **given})
        with _in_lines(self.runs), process.prepared(runfolder.MARK), ExitStack() as at_end:
            process.require_installed()
            at_end.enter_context(_one_thread())
            try:
                session.run(file, self._site(*where), self.runs, rerun, _shown(at_end))
            except session.CutShort:
                print("the job around this process ends before the study; run() goes on in another")
            except KeyboardInterrupt:
                raise Interrupted("interrupted; run() goes on from here") from None
        return self.ledger

    def _site(self, name: str, settings: Mapping[str, Plain] | None) -> Site:
        texts = {
            key: value if isinstance(value, str) else toml.value(value, f"settings: {key}")
            for key, value in (settings or {}).items()
        }
        return get(name, texts, [self.path.parent, user_folder()])

    # -- what came of it ---------------------------------------------------------------------------

    @property
    def folder(self) -> Path:
        """Of the run."""
        return self.runs / self.file.study.name

    @property
    def view(self) -> View:
        """The run as it is now.

        Raises:
            N3LOError: it was not started.
        """
        if not Ledger(self.folder).sessions:
            raise N3LOError(f"there is no ledger in '{self.folder}': run() starts the study")
        return View(self.folder)

    @property
    def ledger(self) -> Ledger:
        """As it is now.

        Raises:
            N3LOError: the study was not started.
        """
        return self.view.ledger

    def trials(self) -> pd.DataFrame:
        """One row a trial."""
        return self.ledger.trials()

    def tasks(self) -> pd.DataFrame:
        """One row a (trial, fold)."""
        return self.ledger.tasks()

    def history(self, trial: Trial | None = None, fold: int | None = None) -> pd.DataFrame:
        """One row an epoch, of all tasks or of some."""
        return self.ledger.history(trial=trial, fold=fold)

    def status(self) -> None:
        """Print how far the study is, and what runs."""
        view = self.view
        look.print_status(view.ledger, view.file.study, console.terminal())

    @checked
    def show(self, trial: Trial) -> None:
        """Print all about a trial: its point, its folds, where they ran."""
        look.print_trial(self.ledger, trial, console.terminal())

    @checked
    def logs(self, task: str, lines: Whole = 50) -> None:
        """Print the end of the log of a task, such as "t003-f1"."""
        look.print_log(self.ledger, task, lines, False, console.terminal())

    def watch(self) -> Any:
        """The run as widgets in a notebook, refreshed in the background."""
        with _in_lines(self.runs):
            from workflow import monitor

            return monitor.watch(self.folder)

    @checked
    def report(
        self,
        to: str | Path | None = None,
        *,
        markdown: str | Path | None = None,
        figures: str | Path | None = None,
        format: str | None = None,
    ) -> list[Path]:
        """Print the best trials, failures and cost; write the page, and what else is named.

        Args:
            to: the page (default: report.html in the run folder).
            markdown: the file of a summary.
            figures: the folder of figures for a paper.
            format: of the figures: "pdf" (default), "png" or "svg".

        Returns:
            The files that were written.
        """
        pages = commands.Pages(
            to=_path(to), markdown=_path(markdown), figures=_path(figures), format=format
        )
        with _in_lines(self.runs):
            return commands.report(self.view, pages)

    @checked
    def compare(self, *others: Study | str | Path, to: str | Path | None = None) -> None:
        """Print this run beside others: studies, study files or run folders."""
        views = [
            each.view
            if isinstance(each, Study)
            else commands.view_of(Path(each).expanduser(), self.runs)
            for each in (self, *others)
        ]
        with _in_lines(self.runs):
            commands.compare(views, _path(to))

    @checked
    def export(self, to: str | Path, tracker: str | None = None, table: str | None = None) -> None:
        """Write the ledger as tables (.csv, .parquet, .h5, .sqlite), or for a tracker.

        Args:
            tracker: "optuna", "mlflow" or "tensorboard".
            table: only this one: "tasks", "trials", "history" or "attempts".
        """
        with _in_lines(self.runs):
            from workflow import exports

            view = self.view
            target = os.path.expanduser(to)  # which may be an address
            exports.export(view.ledger, view.file, target, tracker, table)

    @checked
    def ensemble(self, best: Several = 5, to: str | Path | None = None) -> None:
        """Average what the best trials give, and print what that gains."""
        with _in_lines(self.runs):
            commands.ensemble(self.view, best, _path(to))

    @checked
    def export_model(
        self,
        to: str | Path,
        trial: Trial | None = None,
        fold: Whole = 0,
        network: str | None = None,
    ) -> None:
        """Write a trained network, of the best trial by default, as .onnx or .pt2."""
        self._use("export", to, (trial, fold), commands.network_words(network))

    @checked
    def predict(
        self,
        to: str | Path,
        on: Files = (),
        trial: Trial | None = None,
        fold: Whole = 0,
    ) -> None:
        """Write what a trained network, of the best trial by default, gives for events, as HDF5.

        Args:
            on: files, or patterns such as "new_*.h5", whose events need have no targets; none = the
                validation events of the fold.
        """
        self._use("predict", to, (trial, fold), commands.file_words(on))

    @checked
    def generate(
        self,
        to: str | Path,
        events: Several = 1000,
        *,
        energy: Pair = (10.0, 100.0),
        like: str | Path | None = None,
        seed: Whole = 1,
    ) -> None:
        """Write showers of the best trained generator.

        Args:
            energy: uniform between these, in GeV.
            like: instead: the energies of that HDF5 file.
        """
        words = commands.shower_words(events, energy, _path(like), seed)
        self._use("generate", to, (None, 0), words)

    def _use(
        self, program: str, to: str | Path, task: tuple[int | None, int], words: Sequence[str]
    ) -> None:
        trial, fold = task
        path = Path(to).expanduser()
        what = commands.Use(program=program, to=path, trial=trial, fold=fold, words=words)
        with _in_lines(self.runs):
            commands.use(self.view, what)


def _as_read(name: str, value: Plain) -> Plain:
    """A value as it would be read from the study file: plain.

    None stays for what is left out: a value, or one of a section that is given as a table.

    Raises:
        N3LOError: TOML, or a study, has no such value.
    """
    if value is None:
        return None
    if isinstance(value, Mapping) and "." not in name:
        return {key: _as_read(f"{name}.{toml.key(key)}", each) for key, each in value.items()}
    return tomllib.loads(f"_ = {toml.value(value, name)}")["_"]


def _path(given: str | Path | None) -> Path | None:
    return None if given is None else Path(given).expanduser()


@contextmanager
def _in_lines(runs: Path) -> Iterator[None]:
    """What the user can mend is one line here too."""
    try:
        yield
    except Exception as error:
        line = process.line_of(error, str(runs))
        if line is None or isinstance(error, N3LOError) or line == str(error):
            raise
        raise N3LOError(line) from None


@contextmanager
def _one_thread() -> Iterator[None]:
    """For numpy, which the caller may have imported before `process.prepare` could tell it."""
    if importlib.util.find_spec("threadpoolctl") is None:
        yield
        return
    from threadpoolctl import threadpool_limits

    with threadpool_limits(1):
        yield


def _shown(at_end: ExitStack) -> Callable[[Path], bool]:
    """How a run is shown in a notebook that has what it takes: as widgets, up to its end."""

    def show(folder: Path) -> bool:
        needed = ("ipywidgets", "anywidget", "itables")
        if not _is_notebook() or any(importlib.util.find_spec(name) is None for name in needed):
            return False
        from workflow import monitor

        shown = monitor.watch(folder)
        at_end.callback(shown.stop)
        at_end.callback(lambda: shown.refresh(anyway=True))
        sys.modules["IPython"].display.display(shown)
        return True

    return show


def _is_notebook() -> bool:
    """Whether this process is the kernel of one."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")
