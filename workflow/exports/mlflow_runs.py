"""The tasks as runs of MLflow: in a new file, or on a server that others use too."""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from apps.contract import N3LOError
from workflow import extras
from workflow.exports.runs import FACTS, Run, runs
from workflow.ledger import Ledger
from workflow.study import StudyFile
from workflow.whole import whole_database

# What waits was cut off, or it would be no run.
STATES = {
    "done": "FINISHED",
    "failed": "FAILED",
    "running": "RUNNING",
    "waiting": "KILLED",
    "dropped": "KILLED",
}
# No message to its makers, and no minutes of waiting for a server that is not there.
_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
}
_NUM_METRICS, _NUM_PARAMETERS = 1000, 100  # that a server takes at once
_LONGEST = 500  # characters of a message; servers cut long ones off
_RUN = "n3lo.run"  # the tag that says of which run folder it is, wherever that is now

T = TypeVar("T")


def write_mlflow(ledger: Ledger, file: StudyFile, target: str) -> None:
    """Write one run a task to an experiment of the study's name.

    Args:
        target: a new SQLite file; or the address of a server or a database, on which runs of an
            earlier export are replaced if they have changed.

    Raises:
        N3LOError: the file cannot be replaced, or the server does not do as it is asked.
        ModuleNotFoundError: MLflow is not installed.
    """
    extras.require(*extras.LIBRARIES["mlflow"])
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries that it brings, about each other
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError

        logging.getLogger("mlflow").setLevel(logging.WARNING)
        try:
            if "://" in target:
                _send(MlflowClient(target), ledger, file, None)
                return
            with whole_database(Path(target)) as built:
                artifacts = Path(target).resolve().with_suffix(".artifacts")
                _send(MlflowClient(f"sqlite:///{built}"), ledger, file, str(artifacts))
        except (MlflowException, SQLAlchemyError) as error:
            raise N3LOError(f"--to {target}: MLflow: {str(error).splitlines()[0]}") from None


def _send(client: Any, ledger: Ledger, file: StudyFile, artifacts: str | None) -> None:
    """
    Args:
        artifacts: a folder for what others may add to the runs; None: as the server has it.
    """
    known = client.get_experiment_by_name(file.study.name)
    if known is not None:
        experiment = known.experiment_id
    else:
        experiment = client.create_experiment(file.study.name, artifact_location=artifacts)
    began = ledger.sessions[0]["time"]
    earlier = {run.info.run_name: run for run in _earlier(client, experiment, f"{began}")}
    for run in runs(ledger, file):
        tags = {_RUN: f"{began}", **_tags(run, ledger)}
        before = earlier.get(run.name)
        if before is not None:
            if run.state.status != "running" and tags.items() <= before.data.tags.items():
                continue
            client.delete_run(before.info.run_id)
        _log(client, experiment, run, tags)


def _earlier(client: Any, experiment: str, began: str) -> Iterator[Any]:
    """The runs that earlier exports of this ledger have made."""
    token = None
    while token != "":
        page = client.search_runs(
            [experiment], f"tags.`{_RUN}` = '{began}'", page_token=token, max_results=1000
        )
        yield from page
        token = page.token or ""


def _tags(run: Run, ledger: Ledger) -> dict[str, str]:
    state = run.state
    tags = {
        "n3lo.trial": f"{run.trial}",
        "n3lo.fold": f"{run.fold}",
        "n3lo.key": state.key,
        "n3lo.status": state.status,
        "n3lo.attempt": f"{state.attempts}",
        "n3lo.folder": str(ledger.files_of(run.trial, run.fold).folder.resolve()),
        "n3lo.reason": state.reason,
        "n3lo.message": state.message[:_LONGEST],
    }
    return {name: value for name, value in tags.items() if value}


def _log(client: Any, experiment: str, run: Run, tags: dict[str, str]) -> None:
    from mlflow.entities import Param

    begin_ms = round(1000 * run.begin)
    made = client.create_run(experiment, begin_ms, tags, run.name).info.run_id
    params = [Param(_name(name), str(value)) for name, value in run.parameters.items()]
    for some in _parts(params, _NUM_PARAMETERS):
        client.log_batch(made, params=some)
    for some in _parts(list(_metrics(run)), _NUM_METRICS):
        client.log_batch(made, metrics=some)
    state = STATES[run.state.status]
    if state != "RUNNING":
        client.set_terminated(made, state, round(1000 * run.end))


def _metrics(run: Run) -> Iterator[Any]:
    """Each epoch's under their own names; "result/" before those of the selected epoch."""
    from mlflow.entities import Metric

    for row in run.rows:
        time_ms, epoch = round(1000 * run.time_of(row)), round(row["epoch"])
        for name in row.keys() - {"epoch"}:
            yield Metric(_name(name), row[name], time_ms, epoch)
    if result := run.state.result:
        numbers = {name: result[name] for name in FACTS if result.get(name) is not None}
        found = {f"result/{name}": value for name, value in (numbers | result["metrics"]).items()}
        for name, value in {"fom": result["fom"], **found}.items():
            yield Metric(_name(name), value, round(1000 * run.end), result["epoch"])


def _name(text: str) -> str:
    """With the signs that MLflow takes in names."""
    return re.sub(r"[^/\w.\- :]", "_", text)


def _parts(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for first in range(0, len(items), size):
        yield items[first : first + size]
