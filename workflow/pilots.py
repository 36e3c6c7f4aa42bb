"""What becomes of the pilots of a study, for its user to hear while it waits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from parsl.executors.high_throughput.errors import CommandClientBadError, CommandClientTimeoutError

SILENT_S = 120  # after which a pilot without a worker is worth a word
LOOK_S = 10  # between looks whether one has come
ANSWER_S = 60  # within which Parsl must say

_SAID = {
    "PENDING": "is in the queue",
    "HELD": "is held in the queue",
    "RUNNING": "runs",
    "TIMEOUT": "has reached its walltime",
    "CANCELLED": "was cancelled",
    "COMPLETED": "has ended",
    "FAILED": "failed",
    "MISSING": "ended before a worker of it had come",
}
_LOOK_THERE = ("FAILED", "MISSING")


@dataclass
class Watch:
    """The batch jobs of an executor of Parsl."""

    executor: Any
    _states: dict[str, str] = field(default_factory=dict)  # by block, which is a pilot to Parsl
    _silent_since: dict[str, float] = field(default_factory=dict)
    _looked: float = 0.0

    def news(self, now: float) -> Iterator[str]:
        """A line for each pilot that has come, begun, ended, or that seems not to work.

        Args:
            now: as of time.monotonic().
        """
        for block, status in list(self.executor.status_facade.items()):
            state = status.state.name
            if state == self._states.get(block):
                continue
            self._states[block] = state
            self._silent_since.pop(block, None)
            if state == "RUNNING":
                self._silent_since[block] = now
            if state in _SAID:
                yield self._told(block, status)
        yield from self._silent(now)

    def _told(self, block: str, status: Any) -> str:
        job = self.executor.blocks_to_job_id.get(block)
        if job is None:
            return f"no job could be submitted: {' '.join(str(status.message).split())[:400]}"
        told = f"job {job} {_SAID[status.state.name]}"
        if status.state.name in _LOOK_THERE and status.stderr_path:
            told += f"; see {os.path.relpath(status.stderr_path)}"
        return told

    def _silent(self, now: float) -> Iterator[str]:
        """Of pilots that run and have no worker."""
        if not self._silent_since or now - self._looked < LOOK_S:
            return
        self._looked = now
        try:
            # Its own `connected_blocks` would wait for ever for an interchange that is gone.
            connected = self.executor.command_client.run("CONNECTED_BLOCKS", timeout_s=ANSWER_S)
        except (CommandClientBadError, CommandClientTimeoutError):
            return
        for block in connected:
            self._silent_since.pop(block, None)
        for block, since in list(self._silent_since.items()):
            if now - since > SILENT_S:
                del self._silent_since[block]  # once is enough
                status = self.executor.status_facade[block]
                yield (
                    f"warning: job {self.executor.blocks_to_job_id[block]} runs for "
                    f"{now - since:.0f} s and no worker of it has come: can nodes reach this host "
                    f"at {self.executor.address} (else --set interface=...)? See "
                    f"{os.path.relpath(status.stderr_path or '.')}; 'sites check' looks closer"
                )
