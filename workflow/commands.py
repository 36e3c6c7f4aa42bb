"""What commands do with a run, for the command line (`workflow.cli`) and for Python
(`workflow.api`)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from apps.contract import N3LOError
from workflow import compare as comparing
from workflow import console, datafiles, extras, session, trained, whole
from workflow import report as reporting
from workflow.view import View


def view_of(path: Path, runs: Path) -> View:
    """A run, by its study or its folder.

    Raises:
        N3LOError: it was not started.
    """
    opened = session.open_ledger(path, runs)
    return View(opened[0].folder, opened)


FORMATS = ("pdf", "png", "svg")  # of figures


# -- report ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Pages:
    """What is written of a run, and where."""

    to: Path | None = None  # the page; None = report.html in the run folder
    markdown: Path | None = None
    figures: Path | None = None  # a folder
    format: str | None = None  # of the figures; None = pdf

    def __post_init__(self) -> None:
        if self.format is not None and self.figures is None:
            raise N3LOError(f"--format {self.format} is that of figures: add --figures FOLDER")
        if self.format not in (None, *FORMATS):
            raise N3LOError(f"there is no format '{self.format}', only {', '.join(FORMATS)}")


def report(view: View, pages: Pages) -> list[Path]:
    """Print what came of a study, and write pages and figures; return their paths.

    Raises:
        N3LOError: something is in the way of what is to be written; nothing was printed.
    """
    to = pages.to
    if to is None and os.access(view.folder, os.W_OK):  # a colleague's is only read
        to = view.folder / "report.html"
    _check_targets(pages, to)
    out = console.terminal()
    reporting.print_report(view.ledger, view.file.study, out)
    # Without a search, as where its library is not installed, the best score is all there is.
    with suppress(N3LOError):
        search = session.make_search(view.file)
        session.print_recommended(search, view.file, view.ledger, out)
    if to is None:
        why = f"'{view.folder}' cannot be written to; --to FILE writes it elsewhere"
        out.print(f"\nNo page: {why}", markup=False, soft_wrap=True)
    written = _write_report(pages, to, view)
    if written:
        out.print("\nWritten", style="bold")
    for path in written:
        out.print(str(path), soft_wrap=True)
    return written


def _check_targets(pages: Pages, to: Path | None) -> None:
    """What is in the way is said before anything is drawn."""
    for path in (to, pages.markdown):
        if path is not None:
            whole.check_file(path)
    if pages.figures is not None:
        extras.require("kaleido")
        whole.check_folder(pages.figures)


def _write_report(pages: Pages, to: Path | None, view: View) -> list[Path]:
    """Write the page, and what else is asked for; return all paths."""
    from workflow import page  # with plotly, which takes a second

    written = []
    made = page.figures(view) if to is not None or pages.figures is not None else {}
    if to is not None:
        page.write_page(view, to, made)
        written.append(to)
    if pages.markdown is not None:
        whole.write_whole(pages.markdown, page.markdown(view))
        written.append(pages.markdown)
    if pages.figures is not None:
        written += page.write_figures(made, pages.figures, pages.format or "pdf")
    return written


def compare(views: Sequence[View], to: Path | None) -> None:
    """Print several runs beside each other; also as a page, if it is to be written.

    Raises:
        N3LOError: they are judged by different objectives, or the page cannot be written.
    """
    comparing.check_same_goal(views)
    if to is not None:
        whole.check_file(to)
    out = console.terminal()
    out.print(reporting.plain_table(comparing.table(views)))
    if to is not None:
        from workflow import page

        page.write_comparison(views, to)
        out.print(str(to), soft_wrap=True)


# -- trained networks ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Use:
    """A finished task, and what a program of `apps` is to write of it."""

    program: str
    to: Path
    trial: int | None = None  # None = the best
    fold: int = 0
    words: Sequence[str] = ()  # for the program


def use(view: View, what: Use) -> None:
    """Run a program of `apps` on a finished task.

    Raises:
        N3LOError: the task is not finished, or the program refuses.
    """
    folder = trained.folder_of(view.ledger, view.file.study, what.trial, what.fold)
    trained.run_program(what.program, [str(folder), str(what.to), *what.words])


def network_words(network: str | None) -> list[str]:
    """For `apps.export`, of a model of several networks."""
    return ["--network", network] if network else []


def file_words(on: Sequence[str | Path]) -> list[str]:
    """For `apps.predict`: files of events, or patterns; none = those that validate.

    Raises:
        N3LOError: a pattern matches none.
    """
    try:
        files = datafiles.found([Path(each) for each in on])
    except N3LOError as error:
        raise N3LOError(f"--on: {error}") from error
    return ["--on", *map(str, files)] if files else []


def shower_words(events: int, energy: Sequence[float], like: Path | None, seed: int) -> list[str]:
    """For `apps.generate`: energies in GeV, uniform between two, or those of a file."""
    words = ["--events", str(events), "--energy", *map(str, energy)]
    words += ["--like", str(like)] if like else []
    return [*words, "--seed", str(seed)]


def ensemble(view: View, best: int, to: Path | None) -> None:
    """Average what the best trials give, and print what that gains.

    Raises:
        N3LOError: no trial has finished all its folds, or their networks cannot be averaged.
    """
    folders_by_trial = trained.best_folders(view.ledger, view.file.study, best)
    if len(folders_by_trial) < best:
        print(f"--best {best}: only {len(folders_by_trial)} finished all folds", flush=True)
    given = ["--to", str(to)] if to else []
    for trial, folders in folders_by_trial.items():
        given += ["--member", f"t{trial:03d}", *map(str, folders)]
    trained.run_program("ensemble", given)
