"""Run by test_staging.py, several times at once: `staging_ranks.py go cache command file...`.

Waits until the file `go` is there, so that all start at the same time; prints where the files are,
and then keeps them until its input ends.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from apps.contract import N3LOError
from apps.staging import stage

if __name__ == "__main__":
    go, cache, command, *files = sys.argv[1:]
    print("ready", flush=True)
    while not Path(go).exists():
        time.sleep(0.001)
    try:
        for path in stage(files, cache, command or None):
            print(path, flush=True)
    except N3LOError as error:
        sys.exit(str(error))
    sys.stdin.read()
