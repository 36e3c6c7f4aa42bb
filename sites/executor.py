"""Parsl as all sites use it: a pool of workers in each pilot, which start one task at a time."""

from __future__ import annotations

import json
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Any


def room(hosts: str, node: dict[str, Any]) -> str:
    """What the script of a pilot does first: it says what there is to share (`apps.room`).

    Args:
        hosts: shell words that print the names of the pilot's nodes.
        node: an `apps.room.Node` as a dict.
    """
    return "\n".join(
        [
            'export N3LO_POOL=$(mktemp -d "${TMPDIR:-/tmp}/n3lo-XXXXXXXX")',
            # Moved first: workers that are at their end would write into what is being removed.
            'trap \'mv "$N3LO_POOL" "$N3LO_POOL.old" && rm -rf "$N3LO_POOL.old"\' EXIT',
            f"export N3LO_NODES=$({hosts})",
            '[ -d "$N3LO_POOL" ] && [ -n "$N3LO_NODES" ] || {',
            '    echo "n3lo: no folder for temporary files, or no list of nodes" >&2; exit 1; }',
            f"export N3LO_NODE={shlex.quote(json.dumps(node))}",
        ]
    )


def provider_here(worker_init: str) -> Any:
    """Parsl's for a pool of workers on this host, which is started again if it ends."""
    from parsl.launchers import SimpleLauncher
    from parsl.providers import LocalProvider

    return LocalProvider(
        init_blocks=1,
        min_blocks=1,
        max_blocks=1,
        launcher=SimpleLauncher(),
        worker_init=worker_init,
    )


def config(
    label: str,
    provider: Any,
    run_dir: Path,
    memoizer: Any,
    *,
    strategy_period: float,
    last_start: Path | None = None,
    **options: Any,
) -> Any:
    """A parsl.Config.

    Args:
        strategy_period: how soon pilots are asked for, in seconds.
        last_start: a file that says how many seconds before its end a pilot begins no task; it is
            read when a pilot starts.
        options: of the executor.
    """
    from parsl.config import Config
    from parsl.executors import HighThroughputExecutor
    from parsl.executors.high_throughput.executor import DEFAULT_LAUNCH_CMD
    from parsl.jobs.error_handlers import windowed_error_handler

    # By its path: the one that a pilot finds on PATH may be another Python's.
    launch = f"{Path(sys.executable).parent}/{DEFAULT_LAUNCH_CMD}"
    if last_start is not None:
        file = shlex.quote(str(last_start)).replace("{", "{{").replace("}", "}}")
        # A little sooner, or what waited there in vain would be given to this very pilot again.
        drain_s = "$((N3LO_LAST_START - 3 - $(date +%s)))"
        launch = (
            f"export N3LO_LAST_START=$((N3LO_PILOT_END - $(cat {file})))\n"
            f"{launch.replace('{drain_period}', drain_s)}"
        )
    return Config(
        executors=[
            HighThroughputExecutor(
                label=label,
                loopback_address="127.0.0.1",
                encrypted=True,
                interchange_launch_cmd=[
                    *(sys.executable, "-P", "-m", "sites.detached"),
                    *(str(run_dir / "interchange.txt"), "interchange.py"),
                ],
                launch_cmd=launch,
                cores_per_worker=1e-6,  # the slots are counted here, not by Parsl
                block_error_handler=partial(windowed_error_handler, threshold=3),
                provider=provider,
                **options,
            )
        ],
        memoizer=memoizer,
        run_dir=str(run_dir),
        retries=0,  # workflow/campaign.py retries, so that each attempt is a row of the ledger
        strategy_period=strategy_period,
        usage_tracking=0,
    )
