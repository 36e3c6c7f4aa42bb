"""One start of the driver: from a study file to the end of its campaign."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import shlex
import socket
import tempfile
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console as Terminal

from apps.contract import CENTRAL, VERSION, Fingerprint, N3LOError, TaskPaths, goal_of, ranks_of
from apps.launch import PILOT_GRACE_S, training_line
from sites.base import Site
from sites.launchers import Shape
from workflow import PROGRAM, extras, plan, preflight, report, runfolder
from workflow.console import Console, terminal
from workflow.findings import plural
from workflow.fingerprint import fingerprint
from workflow.ledger import Ledger, session_facts
from workflow.plan import Planner
from workflow.scores import Scoring
from workflow.search import Observation, Problem, Proposal, Search, create
from workflow.study import Search as SearchSection
from workflow.study import Study, StudyFile, load

if TYPE_CHECKING:
    from workflow.cache import ResultCache

PLANNED_TRIALS = 3  # shown in full by `plan`


class CutShort(Exception):
    """The job around the driver ends before the study."""

    def __init__(self, has_trained: bool) -> None:
        super().__init__()
        self.has_trained = has_trained


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A study that can run on a site, as far as that can be seen before it does."""

    largest: Shape  # of its tasks
    smallest: Shape
    num_slots: int  # for the largest
    search: Search
    planner: Planner
    warm: _Warm
    checked: dict[str, Any]  # by `apps.check`


def prepared(file: StudyFile, site: Site, runs: Path) -> Prepared:
    """Look at all that can be wrong with a study; fetch its data, if they are elsewhere.

    Raises:
        N3LOError, SiteError: something is wrong that the user can mend; nothing was started.
    """
    folder = runs / file.study.name
    runfolder.check(folder, file)
    largest = plan.largest_shape(file)
    num_slots = site.num_slots(largest)
    search = make_search(file)
    planner = _planner(file, runs)
    _check_options(Ledger(folder), file, search)
    return Prepared(
        largest=largest,
        smallest=plan.smallest_shape(file),
        num_slots=num_slots,
        search=search,
        planner=planner,
        warm=_warm_start(file),
        checked=_checked(file, planner, folder),
    )


def run(
    file: StudyFile,
    site: Site,
    runs: Path,
    rerun: Sequence[int] = (),
    begun: Callable[[Path], bool] | None = None,
) -> int:
    """Run a study on a site; return the exit status.

    Args:
        file: the study.
        site: where its tasks run.
        runs: the folder of all run folders and their cache.
        rerun: trials whose results are to be forgotten first.
        begun: called with the run folder once a ledger is in it; returns whether what is done is
            shown elsewhere, so that only failures need lines.

    Raises:
        N3LOError: something is wrong that the user can mend; nothing was started.
        CutShort: the site was over before the study was.
    """
    require_libraries(file)
    site.check()
    ready = prepared(file, site, runs)
    search, planner, warm = ready.search, ready.planner, ready.warm
    folder, out = runs / file.study.name, terminal()

    # With Parsl, which takes a second: not before all is well.
    from workflow.cache import ResultCache
    from workflow.campaign import Campaign
    from workflow.tasks import EngineError, engine

    with runfolder.opened(folder, file):
        preflight.remember(ready.checked, folder)
        ledger, results = Ledger(folder), ResultCache(runs / "cache")
        _explain_changes(ledger.fingerprint(), planner.fingerprint, out)
        _start_session(ledger, site, ready)
        aside = set_aside(ledger, file)
        _forget(rerun, ledger, planner, results)
        study = file.study
        budget = (study.search.num_trials, study.data.folds)
        console = Console(study.search.objective, *budget, ready.num_slots, out)
        console.is_shown = begun is not None and begun(folder)
        console.note(_headline(study, site, ready, folder))
        for warning in [*_warnings(study), *ready.checked["warnings"]]:
            console.note(f"warning: {warning}")
        for line in [*warm.lines, *aside]:
            console.note(line)
        try:
            smallest, least_s = ready.smallest, ledger.least_s()
            with console.showing(), engine(site, smallest, least_s, folder, results) as started:
                campaign = Campaign(planner, search, ledger, started, console)
                campaign.node_share, campaign.warm = site.node_share(ready.largest), warm.trials
                campaign.last_begin = site.end - PILOT_GRACE_S
                campaign.run()
        except EngineError as error:
            raise N3LOError(
                f"the task engine broke down: {error}; the same command goes on"
            ) from None
        report.print_best(ledger, study, out)
        print_recommended(search, file, ledger, out)
        out.print(f"  more: {PROGRAM} report {_typed(folder)}")
        if campaign.is_cut_short:
            out.print(
                f"the job ends; {plural(campaign.cut_off, 'task')} cut off; the same command goes "
                f"on in another"
            )
            raise CutShort(campaign.has_trained)
        failed = sum(
            task.status == "failed"
            for number in ledger.counted(study.search.num_trials)
            for task in ledger.trials_by_number[number].tasks.values()
        )
        if failed:
            out.print(f"{failed} tasks failed: see the report; the same command runs them again")
        return 1 if failed else 0


def _warnings(study: Study) -> list[str]:
    """What is allowed, but seldom meant."""
    objective = study.search.objective
    if goal_of(objective.metric) in (None, objective.goal):
        return []
    return [
        f"search.objective: {objective.metric} with goal '{objective.goal}' looks for the worst"
    ]


def require_libraries(file: StudyFile) -> None:
    """Say what a study lacks now, and not in every task.

    Raises:
        N3LOError, ModuleNotFoundError: it lacks something.
    """
    training = file.study.training
    of_options = ("tensorboard",) if training.tensorboard else ()
    extras.require("parsl", "mpi4py", *extras.OF_PROGRAMS, *of_options)
    groups = training.strategy in CENTRAL and file.study.layout.ranks_per_worker > 1
    wanted = (training.strategy == "allreduce" or groups) and training.backend == "horovod"
    if wanted and importlib.util.find_spec("horovod") is None:
        raise N3LOError(
            "Horovod is missing: type 'make setup', or set training.backend = \"ddp\" in the study"
        )


def print_plan(file: StudyFile, site: Site, runs: Path) -> None:
    """Print what a run would do: trials, tasks, layout, launch lines."""
    out = terminal()
    ready = prepared(file, site, runs)
    search, planner, warm, checked = ready.search, ready.planner, ready.warm, ready.checked
    study, ledger = file.study, Ledger(runs / file.study.name)
    out.print(_headline(study, site, ready, runs / study.name))
    out.print(
        f"data: {checked['events']} events; per fold {checked['train_events']} to train on, "
        f"{checked['val_events']} to validate"
    )
    out.print(
        f"model: {study.model.source}, {checked['num_parameters']} parameters as the study "
        f"has it; {checked['steps_per_epoch']} steps an epoch"
    )
    for warning in [*_warnings(study), *checked["warnings"]]:
        out.print(f"warning: {warning}")
    trials = study.search.num_trials
    known = len(ledger.trials_by_number)
    out.print(
        f"{trials} trials x {study.data.folds} folds = {trials * study.data.folds} tasks of "
        f"{ranks_of(study.training, study.layout)} as the study has it; "
        f"{known} trials are known from earlier starts"
    )
    pilots = site.pilots_of(ready.smallest, runs / study.name / "parsl")
    if pilots is not None:
        sizes = ", or ".join(
            f"{plural(site.num_slots(size) // pilots.number, 'task')} of {_size(size)}"
            for size in dict.fromkeys([ready.smallest, ready.largest])
        )
        out.print(f"pilots at once: {pilots.number}; in each is room for {sizes}", soft_wrap=True)
    for number in _outside(ledger, file):
        ledger.trials_by_number[number].aside = True
    history, pending = plan.fitted(file, *ledger.known())
    counted, first_new = ledger.counted(trials), len(ledger.trials_by_number)
    num_new = min(trials - len(counted), PLANNED_TRIALS)
    shown: dict[str, str] = {}
    for trial in [*counted, *range(first_new, first_new + num_new)]:
        if trial in ledger.trials_by_number:
            proposal = ledger.trials_by_number[trial].proposal
            tasks = planner.known_tasks(ledger, trial)
        else:
            rng = plan.search_rng(study.seed, trial)
            proposed = search.propose([*warm.trials, *history], pending, 1, rng)
            if not proposed or proposed[0].parent is not None:  # it depends on results
                break
            proposal = planner.with_first_point(proposed[0], [*history, *pending], rng)
            proposal = dataclasses.replace(proposal, number=trial)
            pending.append(proposal)
            tasks = planner.tasks(proposal)
        size = plan.shape_of(tasks[0].training, tasks[0].layout)
        if (variables := site.environment(size)) != shown:
            words = [f"{name}={value}" for name, value in variables.items()]
            out.print(f"variables of the ranks: {shlex.join(words)}", soft_wrap=True)
            shown = variables
        out.print(f"t{trial:03d}: {proposal.point}{_said(proposal)}")
        for task in tasks:
            paths = TaskPaths((runs / study.name / task.id).resolve())
            line = training_line(site.command(size), paths)
            out.print(f"  {task.id}: {shlex.join(line)}", soft_wrap=True)
    if pilots is not None:
        out.print("the batch script of a pilot:")
        out.print(textwrap.indent(pilots.script.rstrip(), "  "), soft_wrap=True)


def _size(shape: Shape) -> str:
    ranks, cores = plural(shape.num_ranks, "rank"), plural(shape.num_cores, "core")
    gpus = f" and {plural(shape.num_gpus, 'GPU')}" if shape.num_gpus else ""
    return f"{ranks} on {cores}{gpus}"


def _said(proposal: Proposal) -> str:
    """What a proposal is besides its point, in words."""
    facts = {**proposal.settings, **proposal.tags}
    parts = [f"{name} = {value}" for name, value in facts.items()]
    if proposal.parent is not None:
        parts.append(f"goes on from t{proposal.parent:03d}")
    return f"  ({', '.join(parts)})" if parts else ""


def open_ledger(path: Path, runs: Path) -> tuple[Ledger, StudyFile]:
    """The ledger of a study that was started, and the study.

    Args:
        path: the study's file; or its run folder, which may be a copy of any name, without the
            data and the model.
        runs: the folder of the run folder, if `path` is a file.

    Raises:
        N3LOError: it was not started.
    """
    if path.is_dir():
        return runfolder.read(path)
    file = load(path)
    ledger = Ledger(runs / file.study.name)
    beside = path.parent / runs
    if not ledger.sessions and Ledger(beside / file.study.name).sessions:
        raise N3LOError(
            f"there is no ledger in {ledger.folder}, but one beside the study: add --runs {beside}"
        )
    if not ledger.sessions:
        raise N3LOError(
            f"there is no ledger in {ledger.folder}: start the study with "
            f"'{PROGRAM} {_typed(path)}', or name its folder by --runs"
        )
    return ledger, file


def _checked(file: StudyFile, planner: Planner, folder: Path) -> dict[str, Any]:
    """What the look at model and data reports; what the study decides by must be measured."""
    report = preflight.check(planner.base_task(), folder)
    try:
        file.study.check_metrics(report["measured"])
    except ValueError as error:
        raise N3LOError(f"{file.path}: {error}") from None
    return report


def _planner(file: StudyFile, runs: Path) -> Planner:
    files = file.data_files(runs / "cache" / "data")
    memo = runs / "cache" / "digests.json"
    if not runs.is_dir():  # nothing may be left behind if the study turns out to be wrong
        with tempfile.TemporaryDirectory(prefix="n3lo-") as folder:
            digests = fingerprint(file, files, Path(folder) / "digests.json")
    else:
        digests = fingerprint(file, files, memo)
    return Planner(file, files, digests)


def make_search(file: StudyFile) -> Search:
    """The search of a study.

    Raises:
        N3LOError: the method does not know an option, or cannot do what is asked of it.
    """
    settings, study = file.study.search, file.study
    goals = (settings.objective.goal, *(each.goal for each in settings.further_objectives))
    problem = Problem(file.space, goals, study.seed, settings.num_trials, study.training.epochs)
    try:
        search = create(settings.method, problem, settings.options)
    except N3LOError as error:
        key = str(error).partition(":")[0].split(".")
        raise N3LOError(f"{file.where(*key)}{error}") from None
    if settings.racing is not None and settings.spread_penalty > 0:
        raise N3LOError(
            f"{file.where('search', 'racing')}search.racing compares means over folds, and "
            f"spread_penalty = {settings.spread_penalty} asks for another score; leave one out"
        )
    if settings.first_points and settings.method == "constructive":
        raise N3LOError(
            f"{file.where('search', 'first_points')}search.first_points: 'constructive' begins "
            f"with one layer, and has no use for them"
        )
    if search.continues and settings.racing is not None:
        raise N3LOError(
            f"{file.where('search', 'racing')}search.racing: '{settings.method}' stops trials by "
            f"itself, and goes on with all their folds; leave racing out"
        )
    return search


def scoring_of(settings: SearchSection) -> Scoring:
    """How the trials of a study are compared."""
    further = tuple(settings.further_objectives)
    return Scoring(settings.objective, settings.spread_penalty, further)


@dataclass(frozen=True)
class _Warm:
    """Trials of earlier studies that the search is told of, and what to say about them."""

    trials: list[Observation] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)


def _warm_start(file: StudyFile) -> _Warm:
    """The trials of `search.warm_start` that fit this study's space, without their numbers.

    Raises:
        N3LOError: a folder has no ledger, or one with another objective.
    """
    warm = _Warm()
    where = file.where("search", "warm_start") + "search.warm_start"
    space, own = file.space, file.own_values()
    for name in file.study.search.warm_start:
        folder = file.path.parent / Path(name).expanduser()
        ledger = Ledger(folder)
        if not ledger.sessions:
            raise N3LOError(f"{where}: there is no ledger in '{folder}'")
        theirs, ours = ledger.scoring, scoring_of(file.study.search)
        if theirs != ours:
            raise N3LOError(f"{where}: '{folder}' is scored by {theirs}, and this study by {ours}")
        before = runfolder.study_of(folder).own_values()
        in_full = ledger.in_full()
        history = [seen for seen in ledger.known()[0] if seen.proposal.number in in_full]
        # What it did not search had its own value there, not ours.
        own_there = {path: before[path] for path in space.dimensions if path in before}
        fitting = [(seen, space.completed({**own_there, **seen.point}, own)) for seen in history]
        told = [(seen, point) for seen, point in fitting if point is not None]
        for seen, point in told:
            warm.trials.append(dataclasses.replace(seen, proposal=Proposal(point)))
        warm.lines.append(
            f"warm start: {len(told)} of {len(history)} trials of {folder} fit the space"
        )
    return warm


def _outside(ledger: Ledger, file: StudyFile) -> list[int]:
    """The trials whose points are none of the study's space."""
    space, own = file.space, file.own_values()
    return [
        number
        for number, trial in ledger.trials_by_number.items()
        if space.completed(trial.point, own) is None
    ]


def _check_options(ledger: Ledger, file: StudyFile, search: Search) -> None:
    """What the budgets of earlier trials mean cannot change under them.

    Raises:
        N3LOError: its options are not those of the study's earlier starts.
    """
    now = file.study.search
    earlier = [row for row in ledger.sessions if row.get("method") == now.method]
    for session in earlier if search.gives_budgets else []:
        if session["options"] != now.options:
            raise N3LOError(
                f"{file.where('search', 'options')}search.options: this study began '{now.method}' "
                f"with {session['options']}; with others, give it another name"
            )


def set_aside(ledger: Ledger, file: StudyFile) -> list[str]:
    """Record which earlier trials do not fit the space any more; what to say about it."""
    trials = ledger.trials_by_number
    aside = _outside(ledger, file)
    if not aside:
        return []
    ledger.record_aside(aside)
    return [
        f"the space has changed: {len(trials) - len(aside)} earlier trials fit it, {len(aside)} do "
        f"not and are set aside"
    ]


def print_recommended(search: Search, file: StudyFile, ledger: Ledger, out: Terminal) -> None:
    """Where the folds' noise lets another trial look better than the one with the best score."""
    known, _ = plan.fitted(file, *ledger.known())
    done = [n for n, trial in ledger.trials_by_number.items() if trial.status == "done"]
    history = [each for each in known if each.proposal.number in done]
    recommended = search.recommend(history)
    best = min(history, key=search.cost, default=None)
    if recommended is not None and recommended is not best:
        out.print(
            f"with the noise of the folds taken into account, t{recommended.proposal.number:03d} "
            f"is the better choice"
        )


def _start_session(ledger: Ledger, site: Site, ready: Prepared) -> None:
    planner = ready.planner
    settings = planner.file.study.search
    ledger.record_session(
        **session_facts(
            planner.fingerprint,
            version=VERSION,
            host=socket.gethostname(),
            pid=os.getpid(),
            site=site.name,
            node_share=site.node_share(ready.largest),
            num_slots=ready.num_slots,
            study=str(planner.file.path.resolve()),
            method=settings.method,
            options=settings.options,
            num_trials=settings.num_trials,
            num_parallel=settings.num_parallel,
            scoring=scoring_of(settings).plain(),
        )
    )


def _explain_changes(before: Fingerprint | None, now: Fingerprint, out: Terminal) -> None:
    """Say why earlier results do not count any more."""
    if before is None or before == now:
        return
    what = {
        "data": "the contents of the data files",
        "model": "the model's source, or a file that it imports or reads",
        "code": "N3LO's training program",
    }
    changed = [said for name, said in what.items() if getattr(before, name) != getattr(now, name)]
    out.print(
        f"changed since the last start: {' and '.join(changed)}; its results do not count any "
        f"more, and all its trials run again"
    )


def _forget(trials: Sequence[int], ledger: Ledger, planner: Planner, results: ResultCache) -> None:
    """Have the chosen trials run again: their results leave the cache but not the disk."""
    known = ledger.counted(planner.file.study.search.num_trials)
    for trial in trials:
        if trial not in known:
            there = f"{known[0]} to {known[-1]}" if known else "none"
            raise N3LOError(f"--trial {trial}: no such trial in the ledger and budget: {there}")
    for trial in trials:
        for task in planner.known_tasks(ledger, trial):
            results.forget(task.key())
            paths = TaskPaths(ledger.folder / task.id)
            for own in (paths.result, paths.state):
                if own.exists():
                    os.replace(own, own.with_name(f"{own.stem}.superseded{own.suffix}"))
    if trials:
        ledger.record_rerun(list(trials))


def _headline(study: Study, site: Site, ready: Prepared, folder: Path) -> str:
    return (
        f"{study.name} on {site.name}: {study.search.num_trials} trials x {study.data.folds} "
        f"folds, {study.search.method} search; tasks at once: {ready.num_slots}, each of "
        f"{ready.largest.num_ranks} ranks; ledger in {folder}"
    )


def _typed(path: Path) -> str:
    """A path as the user would type it."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
