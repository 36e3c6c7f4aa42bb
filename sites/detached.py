"""Run a program that Ctrl-C does not reach, but that ends with the process that started it.

    python -m sites.detached PROGRAM [ARGUMENT ...]

For Parsl's interchange: Ctrl-C in a terminal would end it before the driver, which then waits for
its answer for ever; and it would outlive a driver that is killed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.execvp(sys.argv[1], sys.argv[1:])
