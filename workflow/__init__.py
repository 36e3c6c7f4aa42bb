"""N3LO: train a neural network on many GPUs and find its best hyper-parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workflow.ledger import Ledger

__all__ = ["Ledger"]


def __getattr__(name: str) -> Any:
    """`from workflow import Ledger`; pandas takes a second, and not all that is here needs it."""
    if name == "Ledger":
        from workflow.ledger import Ledger

        return Ledger
    raise AttributeError(f"module 'workflow' has no attribute '{name}'")
