"""N3LO: train a neural network on many GPUs and find its best hyper-parameters."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from apps.contract import N3LOError
    from sites.base import SiteError
    from workflow.api import Study
    from workflow.ledger import Ledger

__all__ = ["PROGRAM", "Ledger", "N3LOError", "SiteError", "Study"]

CHECKOUT = Path(__file__).resolve().parent.parent  # or site-packages, where there is none
# What a person types here, in front of a command.
PROGRAM = "python run_workflow.py" if Path(sys.argv[0]).name == "run_workflow.py" else "n3lo"

_PLACES = {
    "Ledger": "workflow.ledger",
    "N3LOError": "apps.contract",
    "SiteError": "sites.base",
    "Study": "workflow.api",
}


def __getattr__(name: str) -> Any:
    """`from workflow import Ledger`; pandas takes a second, and not all that is here needs it."""
    if name in _PLACES:
        return getattr(importlib.import_module(_PLACES[name]), name)
    raise AttributeError(f"module 'workflow' has no attribute '{name}'")
