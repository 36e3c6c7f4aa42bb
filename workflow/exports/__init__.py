"""The ledger as files that other programs read: tables, and the stores of experiment trackers.

Whatever is written is there whole or not at all; writing it again replaces it.
"""

from __future__ import annotations

from pathlib import Path

from apps.contract import N3LOError
from workflow.exports.event_files import write_event_files
from workflow.exports.files import write_tables
from workflow.exports.mlflow_runs import write_mlflow
from workflow.exports.optuna_study import write_optuna
from workflow.ledger import Ledger
from workflow.study import StudyFile
from workflow.tables import TABLES

TRACKERS = {
    "optuna": write_optuna,
    "mlflow": write_mlflow,
    "tensorboard": write_event_files,
}


def export(
    ledger: Ledger,
    file: StudyFile,
    target: str,
    tracker: str | None = None,
    table: str | None = None,
) -> None:
    """Write the ledger of a study.

    Args:
        target: a file, whose ending says of what kind; the folder of TensorBoard; or the address
            of an MLflow server.
        tracker: write a store of this one of `TRACKERS`.
        table: of `workflow.tables`. By default a file that can hold several has all of them, and
            any other the tasks.

    Raises:
        N3LOError: there is no such kind of file, or it cannot be replaced.
        ModuleNotFoundError: a library is not installed.
    """
    for what, given, there in (("tracker", tracker, TRACKERS), ("table", table, TABLES)):
        if given is not None and given not in there:
            raise N3LOError(f"there is no {what} '{given}', only {', '.join(there)}")
    if tracker is None:
        write_tables(ledger, Path(target), table)
    elif table is not None:
        raise N3LOError(f"--table {table}: --as {tracker} takes the whole ledger; leave one out")
    else:
        TRACKERS[tracker](ledger, file, target)
