"""The batch script of a pilot, to be read before anything waits in a queue."""

from __future__ import annotations

import os.path
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any, NoReturn


@dataclass(frozen=True, kw_only=True)
class Pilots:
    """What a site has in its queue while a study runs."""

    number: int  # at once
    script: str  # of each


class _Written(Exception):
    """Ends a provider's submission where the script is known and nothing was asked of a queue."""


def script_of(pool: Any, run_dir: Path) -> str:
    """The script by which Parsl would start an executor's workers in a pilot.

    Names stand for what is known only once the driver runs, and for the number of its start, after
    which Parsl calls its folder.

    Args:
        run_dir: of the parsl.Config.
    """
    folder = run_dir.absolute() / "<start>"
    pool.run_dir = str(folder)
    pool.worker_port, pool.cert_dir = "<port>", f"{pool.logdir}/certificates"
    pool.logconf_path = None
    pool.initialize_scaling()
    command = pool._get_launch_command("<pilot>")
    name = f"parsl.{pool.label}.block-<pilot>"
    return rendered(pool.provider, command, str(folder / "submit_scripts"), name)


def rendered(
    provider: Any,
    command: str,
    folder: str = "<run folder>/submit_scripts",
    job_name: str = "parsl",
) -> str:
    """What a provider of Parsl would submit to run a command in a pilot.

    Args:
        folder: where Parsl would write the script, and the pilot its output.

    Returns:
        The script; its job's name has no time stamp, so that it is the same each time.
    """
    path = os.path.abspath(folder)

    def write(template: str, filename: str, job: str, values: Mapping[str, Any]) -> NoReturn:
        text = Template(template).substitute(values, jobname=job)
        name = re.sub(r"\.\d+\.\d+$", "", job)
        raise _Written(text.replace(job, name).replace(path, folder))

    # Its public `execute_wait` comes too late: the one for LSF calls that of its base class.
    assert hasattr(provider, "_write_submit_script")
    provider._write_submit_script = write
    provider.script_dir = path
    try:
        provider.submit(command, 1, job_name)
    except _Written as written:
        return str(written)
    raise AssertionError(f"{type(provider).__name__} submitted what it was to show")
