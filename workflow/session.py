"""One start of the driver: from a study file to the end of its campaign."""

from __future__ import annotations

import importlib.util
import os
import shlex
import socket
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console as Terminal

from apps.contract import VERSION, Fingerprint, N3LOError, TaskPaths, goal_of
from apps.launch import training_line
from sites.base import Site
from workflow import plan, preflight, report, runfolder
from workflow.cache import ResultCache
from workflow.campaign import Campaign
from workflow.console import Console, terminal
from workflow.fingerprint import fingerprint
from workflow.ledger import Ledger, session_facts
from workflow.plan import Planner
from workflow.search import create
from workflow.study import Study, StudyFile
from workflow.tasks import EngineError, engine

PLANNED_TRIALS = 3  # shown in full by `plan`


def run(file: StudyFile, site: Site, runs: Path, rerun: list[int] | None = None) -> int:
    """Run a study on a site; return the exit status.

    Args:
        file: the study.
        site: where its tasks run.
        runs: the folder of all run folders and their cache.
        rerun: trials whose results are to be forgotten first.

    Raises:
        N3LOError: something is wrong that the user can mend; nothing was started.
    """
    _require_horovod(file)
    site.check()
    shape = plan.largest_shape(file)
    num_slots = site.num_slots(shape)
    planner = _planner(file, runs)
    folder = runs / file.study.name
    search = _search(file)
    checked = preflight.check(planner.base_task(), folder)
    out = terminal()
    with runfolder.opened(folder, file):
        preflight.remember(checked, folder)
        ledger, results = Ledger(folder), ResultCache(runs / "cache")
        _explain_changes(ledger.fingerprint(), planner.fingerprint, out)
        _start_session(ledger, planner, site)
        _forget(rerun or [], ledger, planner, results)
        study = file.study
        console = Console(
            study.search.objective, study.search.num_trials, study.data.folds, num_slots, out
        )
        console.note(_headline(study, site, num_slots, shape.num_ranks, folder))
        for warning in [*_warnings(study), *checked["warnings"]]:
            console.note(f"warning: {warning}")
        try:
            with console.showing(), engine(site, shape, folder, results) as started:
                Campaign(planner, search, ledger, started, console, num_slots).run()
        except EngineError as error:
            raise N3LOError(
                f"the task engine broke down: {error}; the same command goes on"
            ) from None
        report.print_best(ledger, study, out)
        out.print(f"  more: python run_workflow.py report {_typed(file.path)}")
        tasks = ledger.tasks().query("trial < @study.search.num_trials")
        failed = int((tasks["status"] == "failed").sum())
        if failed:
            out.print(f"{failed} tasks failed: see the report; the same command runs them again")
        return 1 if failed else 0


def _warnings(study: Study) -> list[str]:
    """What is allowed, but seldom meant."""
    objective = study.search.objective
    if objective.goal == goal_of(objective.metric):
        return []
    return [
        f"search.objective: {objective.metric} with goal '{objective.goal}' looks for the worst"
    ]


def _require_horovod(file: StudyFile) -> None:
    """Say so now, and not in every task."""
    training = file.study.training
    wanted = training.strategy == "allreduce" and training.backend == "horovod"
    if wanted and importlib.util.find_spec("horovod") is None:
        raise N3LOError(
            "Horovod is missing: type 'make setup', or set training.backend = \"ddp\" in the study"
        )


def print_plan(file: StudyFile, site: Site, runs: Path) -> None:
    """Print what a run would do: trials, tasks, layout, launch lines."""
    out = terminal()
    shape = plan.largest_shape(file)
    slots = site.num_slots(shape)
    planner = _planner(file, runs)
    checked = preflight.check(planner.base_task(), runs / file.study.name)
    study = file.study
    search, ledger = _search(file), Ledger(runs / study.name)
    out.print(_headline(study, site, slots, shape.num_ranks, runs / study.name))
    out.print(
        f"data: {checked['events']} events; per fold {checked['train_events']} to train on, "
        f"{checked['val_events']} to validate"
    )
    out.print(
        f"model: {study.model.source}, {checked['num_parameters']} parameters as the study "
        f"has it; {checked['steps_per_epoch']} steps an epoch"
    )
    trials = study.search.num_trials
    known = len(ledger.trials_by_number)
    out.print(
        f"{trials} trials x {study.data.folds} folds = {trials * study.data.folds} tasks of "
        f"{study.layout.num_workers} workers x {study.layout.ranks_per_worker} ranks; "
        f"{known} trials are known from earlier starts"
    )
    history, pending = ledger.known_points()
    for trial in range(min(trials, known + PLANNED_TRIALS)):
        if trial in ledger.trials_by_number:
            point = ledger.trials_by_number[trial].point
        else:
            proposed = search.propose(
                history, pending, num=1, rng=plan.search_rng(study.seed, trial)
            )
            if not proposed:
                break
            point = proposed[0]
            pending.append(point)
        out.print(f"t{trial:03d}: {point}")
        for task in planner.tasks(trial, point):
            paths = TaskPaths((runs / study.name / task.id).resolve())
            line = training_line(site.command(plan.shape_of(task.layout)), paths)
            out.print(f"  {task.id}: {shlex.join(line)}", soft_wrap=True)


def open_ledger(file: StudyFile, runs: Path) -> tuple[Ledger, Study]:
    """The ledger of a study that was started.

    Raises:
        N3LOError: it was not.
    """
    ledger = Ledger(runs / file.study.name)
    if not ledger.sessions:
        raise N3LOError(
            f"there is no ledger in {ledger.folder}: start the study with "
            f"'python run_workflow.py {_typed(file.path)}', or name its folder by --runs"
        )
    return ledger, file.study


def _planner(file: StudyFile, runs: Path) -> Planner:
    files = file.data_files()
    memo = runs / "cache" / "digests.json"
    if not runs.is_dir():  # nothing may be left behind if the study turns out to be wrong
        with tempfile.TemporaryDirectory(prefix="n3lo-") as folder:
            return Planner(file, files, fingerprint(file, Path(folder) / "digests.json"))
    return Planner(file, files, fingerprint(file, memo))


def _search(file: StudyFile) -> Any:
    settings = file.study.search
    return create(
        settings.method,
        file.space,
        settings.objective.goal,
        settings.options,
        file.study.seed,
    )


def _start_session(ledger: Ledger, planner: Planner, site: Site) -> None:
    settings = planner.file.study.search
    ledger.record_session(
        **session_facts(
            planner.fingerprint,
            version=VERSION,
            host=socket.gethostname(),
            pid=os.getpid(),
            site=site.name,
            study=str(planner.file.path.resolve()),
            num_trials=settings.num_trials,
            num_parallel=settings.num_parallel,
        )
    )


def _explain_changes(before: Fingerprint | None, now: Fingerprint, out: Terminal) -> None:
    """Say why earlier results do not count any more."""
    if before is None or before == now:
        return
    what = {
        "data": "the contents of the data files",
        "model": "the model's source, or a file that it imports",
        "code": "N3LO's training program",
    }
    changed = [said for name, said in what.items() if getattr(before, name) != getattr(now, name)]
    out.print(
        f"changed since the last start: {' and '.join(changed)}; its results do not count any "
        f"more, and all its trials run again"
    )


def _forget(trials: list[int], ledger: Ledger, planner: Planner, results: ResultCache) -> None:
    """Have the chosen trials run again: their results leave the cache but not the disk."""
    num_known = min(len(ledger.trials_by_number), planner.file.study.search.num_trials)
    for trial in trials:
        if not 0 <= trial < num_known:
            there = f"0 to {num_known - 1}" if num_known else "none"
            raise N3LOError(f"--trial {trial}: no such trial in the ledger and budget: {there}")
    for trial in trials:
        for task in planner.tasks(trial, ledger.trials_by_number[trial].point):
            results.forget(task.key())
            own = TaskPaths(ledger.folder / task.id).result
            if own.exists():
                os.replace(own, own.with_name("result.superseded.json"))
    if trials:
        ledger.record_rerun(trials)


def _headline(study: Study, site: Site, num_slots: int, num_ranks: int, folder: Path) -> str:
    return (
        f"{study.name} on {site.name}: {study.search.num_trials} trials x {study.data.folds} "
        f"folds, {study.search.method} search; tasks at once: {num_slots}, each of {num_ranks} "
        f"ranks; ledger in {folder}"
    )


def _typed(path: Path) -> str:
    """A path as the user would type it."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
