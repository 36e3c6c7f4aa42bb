"""torchvision beside a torch for which it was not compiled, as one for CPUs alone.

Its wheels on PyPI are compiled for CUDA. Where they cannot be loaded, torchvision goes on without
its compiled operators, which only detection needs, but then describes two of them to torch, which
does not know them, and so no network of it could be imported, nor any of timm.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

import torch

OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


class _Watch:
    """Is asked before torchvision is imported."""

    library: torch.library.Library | None = None  # what it declares is gone with it

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "torchvision" and self.library is None and not _loads():
            self.library = torch.library.Library("torchvision", "DEF")
            for operator in OPERATORS:
                self.library.define(operator)
        return None


_WATCH = _Watch()


def watch() -> None:
    """From now on torchvision can be imported."""
    if _WATCH not in sys.meta_path:
        sys.meta_path.insert(0, _WATCH)


def _loads() -> bool:
    """Whether its compiled operators can be had; also where it is not installed."""
    found = PathFinder.find_spec("torchvision")
    if found is None or not found.submodule_search_locations:
        return True
    folder = Path(found.submodule_search_locations[0])
    return any(_fits(compiled) for compiled in folder.glob("_C*.so"))


def _fits(compiled: Path) -> bool:
    try:
        torch.ops.load_library(compiled)
    except (ImportError, OSError):
        return False
    return True
