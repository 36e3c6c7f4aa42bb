"""The command line. What the user can mend becomes one line and exit status 2."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from apps.contract import VERSION, N3LOError, Plain
from sites import get
from sites.base import Site
from sites.settings import user_folder
from workflow import CHECKOUT, PROGRAM, process

if TYPE_CHECKING:
    from sites.batch import Batch

DEFAULT_STUDY = CHECKOUT / "studies" / "jets.toml"
SOME_FAILED, USER_ERROR, INTERRUPTED, TERMINATED = 1, 2, 130, 143

# What it does, or the commands below it; its line of help; what adds its arguments.
_Command: TypeAlias = tuple[
    Callable[[argparse.Namespace], int] | Mapping[str, "_Command"],
    str,
    Sequence[Callable[[argparse.ArgumentParser], None]],
]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] not in (*COMMANDS, "-h", "--help", "--version"):
        words.insert(0, "run")
    signal.signal(signal.SIGTERM, _terminate)
    signal.signal(signal.SIGHUP, _terminate)  # the terminal, or the ssh behind it, is gone
    process.prepare()
    options = argparse.Namespace()
    try:
        options = _parser().parse_args(words)
        process.require_installed()
        command: Callable[[argparse.Namespace], int] = options.command
        return command(options)
    except KeyboardInterrupt:
        return _say("interrupted; the same command goes on from here", INTERRUPTED)
    except _Terminated:
        return _say("terminated; the same command goes on from here", TERMINATED)
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:  # noqa: BLE001  a traceback is for us, not for the user
        line = process.line_of(error, str(getattr(options, "runs", "standard output")))
        return _internal_error() if line is None else _say(line, USER_ERROR)


class _Terminated(BaseException):
    """SIGTERM or SIGHUP: the batch system, or a person, ends the driver."""


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    raise _Terminated


def _say(line: str, status: int) -> int:
    print(f"n3lo: {line}", file=sys.stderr)
    return status


def _internal_error() -> int:
    with tempfile.NamedTemporaryFile(
        "w", prefix="n3lo-crash-", suffix=".txt", delete=False
    ) as file:
        traceback.print_exc(file=file)
    last = traceback.format_exc().strip().splitlines()[-1]
    return _say(f"a fault of ours: {last}; please report it with {file.name}", SOME_FAILED)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise N3LOError(f"{message}; see '{self.prog} --help'")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog=PROGRAM.split()[-1], description=__import__("workflow").__doc__)
    parser.add_argument("--version", action="version", version=f"n3lo {VERSION}")
    _add_commands(parser, COMMANDS)
    return parser


def _add_commands(parser: argparse.ArgumentParser, commands: Mapping[str, _Command]) -> None:
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (does, summary, arguments) in commands.items():
        command = subparsers.add_parser(name, help=summary, description=summary)
        if isinstance(does, Mapping):
            _add_commands(command, does)
        else:
            command.set_defaults(command=does)
        for argument in arguments:
            argument(command)


def _study_argument(command: argparse.ArgumentParser, others: str = "") -> None:
    has_default = DEFAULT_STUDY.is_file()  # only in a checkout
    command.add_argument(
        "study",
        nargs="?" if has_default else None,
        type=Path,
        default=DEFAULT_STUDY,
        metavar="STUDY",
        help=f"a study file{' (default: studies/jets.toml)' if has_default else ''}{others}",
    )


def _started_argument(command: argparse.ArgumentParser) -> None:
    _study_argument(command, ", or a run folder, also one that was copied and renamed")


def _runs_option(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--runs",
        type=Path,
        default=Path("runs"),
        metavar="FOLDER",
        help="of the run folders and the cache (default: runs)",
    )


def _site_option(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--site", default="local", help="of those that 'sites list' shows (default: local)"
    )


def _site_argument(command: argparse.ArgumentParser) -> None:
    command.add_argument("site", metavar="NAME", help="of those that 'sites list' shows")


def _beside_option(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--study",
        type=Path,
        default=Path("study.toml"),  # its folder counts, whether it is there or not
        metavar="STUDY",
        help="take the sites.toml beside that study (default: the one in this folder)",
    )


def _set_option(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting of the site, such as cores=4; 'sites show NAME' has all",
    )


def _budget_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--trials", type=int, metavar="N", help="instead of search.num_trials")
    command.add_argument("--parallel", type=int, metavar="N", help="instead of search.num_parallel")


def _driver_option(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--driver-in-job",
        action="store_true",
        help="run in the job of the site's batch system around this command, or submit one that "
        "does and leave",
    )


def _watch_option(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--watch", action="store_true", help="again and again, as long as a driver is at work"
    )


def _json_option(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="for programs")


def _trial_argument(command: argparse.ArgumentParser) -> None:
    command.add_argument("of_trial", metavar="TRIAL", help="such as 3 or t003")


def _task_argument(command: argparse.ArgumentParser) -> None:
    command.add_argument("task", metavar="TASK", help="such as t003-f1")


def _log_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--lines", type=int, default=50, metavar="N", help="so many from its end (default: 50)"
    )
    command.add_argument(
        "--follow", action="store_true", help="and what is added, as long as a driver is at work"
    )


def _report_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--to", type=Path, metavar="FILE", help="the page (default: report.html in the run folder)"
    )
    command.add_argument("--markdown", type=Path, metavar="FILE", help="a summary as Markdown")
    command.add_argument("--figures", type=Path, metavar="FOLDER", help="the figures for a paper")
    command.add_argument(
        "--format", choices=["pdf", "png", "svg"], help="of the figures (default: pdf)"
    )


def _compare_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "runs_to_compare", nargs="+", type=Path, metavar="RUN", help="a study file or a run folder"
    )
    command.add_argument("--to", type=Path, metavar="FILE", help="also as a page, with a figure")


def _trial_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--trial",
        action="append",
        required=True,
        metavar="T",
        help="a trial to run again, such as 3 or t003; may be repeated",
    )


def _export_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--to",
        required=True,
        metavar="FILE",
        help="a .csv, .parquet, .h5 or .sqlite file; with --as, an SQLite file, a folder "
        "(tensorboard), or the address of a server (mlflow)",
    )
    command.add_argument(
        "--table",
        choices=["tasks", "trials", "history", "attempts"],
        help="this one only (default: all, or the tasks where a file holds one)",
    )
    command.add_argument(
        "--as",
        dest="tracker",
        choices=["optuna", "mlflow", "tensorboard"],
        help="for one of these programs, not as tables",
    )


def _task_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--trial", metavar="T", help="such as 3 or t003 (default: the best)")
    command.add_argument("--fold", type=int, default=0, metavar="K", help="(default: 0)")
    command.add_argument("--to", type=Path, required=True, metavar="FILE")


def _network_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--network", metavar="NAME", help="of several, such as generator")


def _predict_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--on",
        nargs="+",
        type=Path,
        default=[],
        metavar="FILE",
        help="of events, with or without targets (default: the validation events of the fold)",
    )


def _generate_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--events", type=int, default=1000, metavar="N", help="(default: 1000)")
    command.add_argument(
        "--energy",
        type=float,
        nargs=2,
        default=(10.0, 100.0),
        metavar=("LOW", "HIGH"),
        help="uniform between, in GeV (default: 10 100)",
    )
    command.add_argument(
        "--like", type=Path, metavar="FILE", help="instead: the energies of that HDF5 file"
    )
    command.add_argument("--seed", type=int, default=1, metavar="S", help="(default: 1)")


def _init_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="my_model.py, my_model.py:Name, or package.module:Name",
    )
    command.add_argument("data", nargs="*", metavar="DATA", help="data files, or patterns in ' '")
    command.add_argument(
        "--to", type=Path, default=Path("study.toml"), metavar="FILE", help="(default: study.toml)"
    )
    for role in ("inputs", "targets"):
        command.add_argument(
            f"--{role}",
            nargs="+",
            default=[],
            metavar="FIELD",
            help="of the data (default: what fits the model)",
        )
    command.add_argument(
        "--arg",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an argument of the model, such as width=64; may be repeated",
    )


def _nnlo_options(command: argparse.ArgumentParser) -> None:
    from workflow.nnlo import options

    command.add_argument(
        "model_file", nargs="?", metavar="MODEL", help="NNLO's model file, such as my_model.py"
    )
    command.add_argument(
        "--to", type=Path, default=Path("study.toml"), metavar="FILE", help="(default: study.toml)"
    )
    command.add_argument(
        "--from-script",
        metavar="SCRIPT",
        help="the script that started NNLO, or its line in quotes; words given here win",
    )
    command.add_argument("--ranks", type=int, metavar="N", help="that mpirun started")
    command.add_argument(
        "--driver",
        choices=["training", "optimization"],
        help="(default: the script's, or optimization where get_model has a parameter_range)",
    )
    options.add_to(command)


def _schema_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--to", type=Path, metavar="FILE", help="write it there (default: print it)"
    )


def _data_argument(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="HDF5, NumPy (.npz, .npy), Parquet or ROOT",
    )


def _checked_argument(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE_OR_STUDY",
        help="HDF5, NumPy (.npz, .npy), Parquet, ROOT; or a study (.toml), for what it uses",
    )


def _convert_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--to", type=Path, required=True, metavar="FILE", help="such as out.h5")
    command.add_argument(
        "--fields",
        nargs="+",
        default=[],
        metavar="NAME=FIELD",
        help="as a study names them, such as 'x=(pt, eta, phi)' y=label (default: all arrays)",
    )
    command.add_argument(
        "--compression",
        choices=["lzf", "gzip", "none"],
        default="lzf",
        help="lzf is read fastest, gzip is smallest (default: lzf)",
    )
    command.add_argument(
        "--events-per-file", type=int, metavar="N", help="write several files: out_000.h5, ..."
    )


def _ensemble_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--best", type=int, default=5, metavar="K", help="so many trials (default: 5)"
    )
    command.add_argument(
        "--to", type=Path, metavar="FOLDER", help="write ensemble.json and predictions.h5 there"
    )


def _run(options: argparse.Namespace) -> int:
    return _drive(options, [])


def _rerun(options: argparse.Namespace) -> int:
    return _drive(options, [_trial_number(text) for text in options.trial])


def _drive(options: argparse.Namespace, rerun: list[int]) -> int:
    """Run a study here, or have a job run it."""
    from sites import inside  # with the files of all batch systems
    from workflow import driverjob, session

    file = _study(options)
    where = (options.site, _settings(options), _site_folders(options))
    placed = inside.around(*where) if options.driver_in_job else None
    if options.driver_in_job and placed is None:
        return driverjob.submit(file, _queue(*where), options.runs, _command(options, rerun))
    try:
        return session.run(file, placed or get(*where), options.runs, rerun)
    except session.CutShort as cut:
        if placed is not None and placed.job.is_ours:
            folder, command = options.runs / file.study.name, _command(options, [])
            driverjob.go_on(_queue(*where), folder, command, cut.has_trained)
        return TERMINATED  # as after a SIGTERM: there is more to do


def _queue(*where: Any) -> Batch:
    """The site in whose queue jobs wait."""
    from sites.batch import Batch

    site = get(*where)
    assert isinstance(site, Batch)  # or `inside.around` has complained
    return site


def _command(options: argparse.Namespace, rerun: list[int]) -> list[str]:
    """The same command, as it can be given in any folder."""
    words = ["rerun" if rerun else "run", str(options.study.resolve())]
    given = {
        "--runs": [options.runs.resolve()],
        "--site": [options.site],
        "--set": options.set,
        "--trials": [] if options.trials is None else [options.trials],
        "--parallel": [] if options.parallel is None else [options.parallel],
        "--trial": rerun,
    }
    for name, values in given.items():
        for value in values:
            words += [name, str(value)]
    return [sys.executable, "-P", "-m", "workflow.cli", *words, "--driver-in-job"]


def _plan(options: argparse.Namespace) -> int:
    from workflow import session

    session.print_plan(_study(options), _site(options), options.runs)
    return 0


def _status(options: argparse.Namespace) -> int:
    from workflow import console, look, session

    ledger, file = session.open_ledger(options.study, options.runs)
    if options.json:
        _print_json(look.overview(ledger, file.study))
    elif options.watch:
        look.watch(ledger, file.study, console.terminal())
    else:
        look.print_status(ledger, file.study, console.terminal())
    return 0


def _show_trial(options: argparse.Namespace) -> int:
    from workflow import console, look, session

    ledger, _ = session.open_ledger(options.study, options.runs)
    number = _trial_number(options.of_trial)
    if options.json:
        _print_json(look.trial_facts(ledger, number))
    else:
        look.print_trial(ledger, number, console.terminal())
    return 0


def _logs(options: argparse.Namespace) -> int:
    from workflow import console, look, session

    ledger, _ = session.open_ledger(options.study, options.runs)
    look.print_log(ledger, options.task, options.lines, options.follow, console.terminal())
    return 0


def _print_json(facts: dict[str, Any]) -> None:
    print(json.dumps(facts, indent=1, allow_nan=False))


def _report(options: argparse.Namespace) -> int:
    from workflow import commands

    pages = commands.Pages(
        to=options.to, markdown=options.markdown, figures=options.figures, format=options.format
    )
    commands.report(commands.view_of(options.study, options.runs), pages)
    return 0


def _compare(options: argparse.Namespace) -> int:
    from workflow import commands

    views = [commands.view_of(path, options.runs) for path in options.runs_to_compare]
    commands.compare(views, options.to)
    return 0


def _export(options: argparse.Namespace) -> int:
    from workflow import exports, session

    ledger, file = session.open_ledger(options.study, options.runs)
    exports.export(ledger, file, options.to, options.tracker, options.table)
    print(options.to)
    return 0


def _export_model(options: argparse.Namespace) -> int:
    from workflow import commands

    return _use(options, "export", commands.network_words(options.network))


def _predict(options: argparse.Namespace) -> int:
    from workflow import commands

    return _use(options, "predict", commands.file_words(options.on))


def _generate(options: argparse.Namespace) -> int:
    from workflow import commands

    words = commands.shower_words(options.events, options.energy, options.like, options.seed)
    _use(options, "generate", words)
    print(options.to)
    return 0


def _ensemble(options: argparse.Namespace) -> int:
    from workflow import commands

    commands.ensemble(commands.view_of(options.study, options.runs), options.best, options.to)
    return 0


def _use(options: argparse.Namespace, program: str, words: list[str]) -> int:
    """Run a program of `apps` on a finished task."""
    from workflow import commands

    trial = None if options.trial is None else _trial_number(options.trial)
    what = commands.Use(program=program, to=options.to, trial=trial, fold=options.fold, words=words)
    commands.use(commands.view_of(options.study, options.runs), what)
    return 0


def _init(options: argparse.Namespace) -> int:
    from workflow import init

    if options.model is None or not options.data:
        raise N3LOError(f"init: name a model and data, such as: {init.EXAMPLE}")
    wanted = init.Wanted(
        model=options.model,
        data=options.data,
        args=init.args_of(options.arg),
        inputs=options.inputs,
        targets=options.targets,
    )
    for line in init.write(wanted, options.to, options.runs):
        print(line)
    return 0


def _import_nnlo(options: argparse.Namespace) -> int:
    from workflow.nnlo.command import import_nnlo

    for line in import_nnlo(vars(options)):
        print(line)
    return 0


def _schema(options: argparse.Namespace) -> int:
    from workflow import schema, whole

    if options.to is None:
        print(schema.text(), end="")
        return 0
    whole.write_whole(options.to, schema.text())
    print(options.to)
    return 0


def _check_data(options: argparse.Namespace) -> int:
    from workflow import datafiles

    datafiles.check(options.files, options.runs, options.json)
    return 0


def _convert_data(options: argparse.Namespace) -> int:
    from workflow import datafiles

    datafiles.convert(
        options.files, options.to, options.fields, options.compression, options.events_per_file
    )
    return 0


def _list_sites(options: argparse.Namespace) -> int:
    from workflow import console, siteshow

    siteshow.print_list(_site_folders(options), console.terminal())
    return 0


def _show_site(options: argparse.Namespace) -> int:
    from workflow import console, siteshow

    folders = _site_folders(options)
    siteshow.print_site(options.site, _settings(options), folders, console.terminal())
    return 0


def _check_site(options: argparse.Namespace) -> int:
    from workflow import sitecheck

    return sitecheck.check(_site(options), options.runs)


_STARTED = [_started_argument, _runs_option]
_PLAN = [_study_argument, _runs_option, _site_option, _set_option, _budget_options]
_RUN = [*_PLAN, _driver_option]
_DATA: dict[str, _Command] = {
    "check": (
        _check_data,
        "shapes, ranges, NaN, classes, and what is slow to read",
        [_checked_argument, _runs_option, _json_option],
    ),
    "convert": (
        _convert_data,
        "write well-chunked HDF5 from any format that is read",
        [_data_argument, _convert_options],
    ),
}
_SITES: dict[str, _Command] = {
    "list": (_list_sites, "all sites; those whose programs are found here", [_beside_option]),
    "show": (
        _show_site,
        "what a site is, and its settings with their values",
        [_site_argument, _set_option, _beside_option],
    ),
    "check": (
        _check_site,
        "try a site out before a study runs there",
        [_site_argument, _set_option, _beside_option, _runs_option],
    ),
}
COMMANDS: dict[str, _Command] = {
    "run": (_run, "run a study, or go on with it (the default)", _RUN),
    "plan": (_plan, "show trials, tasks and launch lines; run nothing", _PLAN),
    "status": (_status, "how far a study is", [*_STARTED, _watch_option, _json_option]),
    "show": (
        _show_trial,
        "all about a trial: its point, its folds, where they ran",
        [_trial_argument, *_STARTED, _json_option],
    ),
    "logs": (_logs, "the log of a task", [_task_argument, *_STARTED, _log_options]),
    "report": (
        _report,
        "best trials, failures, scaling, cost; the same and figures as a page",
        [*_STARTED, _report_options],
    ),
    "compare": (_compare, "several runs beside each other", [_compare_options, _runs_option]),
    "export": (
        _export,
        "write the ledger as tables, or for Optuna, MLflow or TensorBoard",
        [*_STARTED, _export_options],
    ),
    "export-model": (
        _export_model,
        "write a trained network as .onnx or .pt2 (torch.export)",
        [*_STARTED, _task_options, _network_options],
    ),
    "predict": (
        _predict,
        "apply a trained network to events of other files, or to those that validate",
        [*_STARTED, _task_options, _predict_options],
    ),
    "generate": (
        _generate,
        "write showers of a trained generator as HDF5",
        [*_STARTED, _task_options, _generate_options],
    ),
    "ensemble": (
        _ensemble,
        "average what the best trials give, and see what that gains",
        [*_STARTED, _ensemble_options],
    ),
    "rerun": (_rerun, "run chosen trials again", [*_RUN, _trial_options]),
    "init": (
        _init,
        "write a first study of a model and its data",
        [_init_options, _runs_option],
    ),
    "import-nnlo": (
        _import_nnlo,
        "write the study of a model file of NNLO and its options",
        [_nnlo_options],
    ),
    "schema": (
        _schema,
        "the JSON schema of a study, with which editors complete and check one",
        [_schema_options],
    ),
    "data": (_DATA, "look at data files, and write them anew as HDF5", []),
    "sites": (_SITES, "the machines that studies can run on", []),
}


def _study(options: argparse.Namespace):  # type: ignore[no-untyped-def]  # StudyFile, imported late
    from workflow.study import load

    wanted = {"search.num_trials": "trials", "search.num_parallel": "parallel"}
    given: dict[str, Plain] = {key: getattr(options, option) for key, option in wanted.items()}
    overrides = {key: value for key, value in given.items() if value is not None}
    return load(options.study, overrides)


def _site(options: argparse.Namespace) -> Site:
    return get(options.site, _settings(options), _site_folders(options))


def _site_folders(options: argparse.Namespace) -> list[Path]:
    """Where a sites.toml may be."""
    return [options.study.parent, user_folder()]


def _settings(options: argparse.Namespace) -> dict[str, str]:
    settings = {}
    for text in options.set:
        key, equals, value = text.partition("=")
        if not (key and equals):
            raise N3LOError(f"--set {shlex.quote(text)}: write it as KEY=VALUE")
        settings[key] = value
    return settings


def _trial_number(text: str) -> int:
    try:
        return int(text.removeprefix("t"))
    except ValueError:
        raise N3LOError(f"--trial {text}: write the trial as 3 or t003") from None


if __name__ == "__main__":
    sys.exit(main())
