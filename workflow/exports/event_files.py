"""The histories as event files of TensorBoard: a folder a task, with its hyper-parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from apps.tensorboard import begin_events, scalars, write_events
from workflow import extras
from workflow.exports.runs import Run, runs
from workflow.ledger import Ledger
from workflow.study import StudyFile
from workflow.whole import whole_folder


def write_event_files(ledger: Ledger, file: StudyFile, target: str) -> None:
    """Write a folder for `tensorboard --logdir`.

    Raises:
        N3LOError: there is a folder of that name with files of others.
        ModuleNotFoundError: TensorBoard is not installed.
    """
    extras.require("tensorboard")
    with whole_folder(Path(target)) as folder:
        for run in runs(ledger, file):
            events = begin_events(folder / run.name, first_epoch=0)
            write_events(events, _events(run))


def _events(run: Run) -> list[Any]:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.plugins.hparams.summary_v2 import hparams_pb

    chosen = {
        name: value if isinstance(value, bool | int | float | str) else str(value)
        for name, value in run.parameters.items()
    }
    # The folds of a trial are one group, of which the dashboard shows the mean.
    hparams = hparams_pb(chosen, trial_id=f"t{run.trial:03d}", start_time_secs=run.begin)
    events = [Event(wall_time=run.begin, summary=hparams)]
    events += [scalars(row, run.time_of(row)) for row in run.rows]
    result = run.state.result
    if result:
        found = {"epoch": result["epoch"], "fom": result["fom"]}
        events.append(scalars(found, run.end))
    return events
