"""Draws figures as files, in a process of its own: `python -P -m workflow.drawing FOLDER`.

In the folder is `orders.json`: for each file its name, format, scale, and the figure as plotly has
it; the files are written beside. A thread of kaleido's logging waits for the end of its browser's
output, for ever where a helper of the browser stays: so this process is left without waiting.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import NoReturn

from apps.contract import read_json


def main(folder: Path) -> NoReturn:
    """Exit status 0; or 1, and why in the folder's `error.txt`."""
    import kaleido  # type: ignore[import-untyped]  # only who wants files has it
    from kaleido.errors import KaleidoError  # type: ignore[import-untyped]

    logging.getLogger("choreographer").setLevel(logging.CRITICAL)  # an error is ours to say
    drawn = [
        {"fig": each["figure"], "path": folder / each["name"], "opts": each["options"]}
        for each in read_json(folder / "orders.json")
    ]
    try:
        # One browser for all. For TeX, which is in none of them, it would ask a network.
        kaleido.write_fig_from_object_sync(drawn, kopts={"mathjax": False}, cancel_on_error=True)
    except (RuntimeError, KaleidoError, TimeoutError) as error:
        (folder / "error.txt").write_text(str(error.args[0] if error.args else error))
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
