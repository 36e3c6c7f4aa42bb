"""Run a program that Ctrl-C does not reach, but that ends with the process that started it.

    python -m sites.detached OUTPUT PROGRAM [ARGUMENT ...]

For Parsl's interchange: Ctrl-C in a terminal would end it before the driver, which then waits for
its answer for ever; and it would outlive a driver that is killed. What it prints is added to the
file OUTPUT: on a full disk it would fill the screen with complaints about its log.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def _print_to(path: str) -> None:
    try:
        output = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    except OSError:
        output = os.open(os.devnull, os.O_WRONLY)
    for standard in (1, 2):
        os.dup2(output, standard)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _print_to(sys.argv[1])
    os.execvp(sys.argv[2], sys.argv[2:])
