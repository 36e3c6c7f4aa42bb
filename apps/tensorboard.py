"""Event files of TensorBoard, by its own library: without TensorFlow, and without a thread.

The library is imported by those who write: it is there only where a study asks for it.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def begin_events(folder: Path, first_epoch: int) -> Path:
    """Begin an event file in a folder.

    What earlier files there say of `first_epoch` and later ones counts no more: an attempt that
    goes on after a kill trains some of them again.
    """
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    folder.mkdir(parents=True, exist_ok=True)
    # TensorBoard knows an event file by its name, and reads those of a folder in this order.
    file = folder / f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}"
    start, now = SessionLog(status=SessionLog.START), time.time()
    version = Event(wall_time=now, file_version="brain.Event:2")
    write_events(file, [version, Event(wall_time=now, step=first_epoch, session_log=start)])
    return file


def scalars(row: Mapping[str, float], wall_time: float) -> Any:
    """The event of an epoch, with all numbers of its row of the history.

    Args:
        wall_time: when the epoch ended, Unix seconds.
    """
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    values = [Summary.Value(tag=n, simple_value=v) for n, v in row.items() if n != "epoch"]
    return Event(wall_time=wall_time, step=int(row["epoch"]), summary=Summary(value=values))


def write_events(file: Path, events: Iterable[Any]) -> None:
    """Add events to the end of a file."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    with open(file, "ab") as opened:
        records = RecordWriter(opened)
        for event in events:
            records.write(event.SerializeToString())
