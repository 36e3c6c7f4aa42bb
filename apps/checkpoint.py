"""Weights and checkpoints: whole or not there, whenever the job is killed."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch


def save(path: Path, content: dict[str, Any]) -> None:
    """Write beside, then rename. Rank 0 is the only writer."""
    beside = path.with_name(f".{path.name}.new")
    with open(beside, "wb") as file:  # given a name, torch would put it into the file's bytes
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def load(path: Path, key: str) -> dict[str, Any] | None:
    """The checkpoint of the task with this key; None if there is none that can be used."""
    if not path.exists():
        return None
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001  a torn file raises nearly anything
        print(f"{path}: starts anew, the checkpoint cannot be read: {error}", file=sys.stderr)
        return None
    if not isinstance(content, dict) or content.get("key") != key:
        print(f"{path}: starts anew, the checkpoint is of another task", file=sys.stderr)
        return None
    return content
