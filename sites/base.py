"""What a site is: a machine's settings, and how tasks of a given shape run there."""

from __future__ import annotations

import dataclasses
import difflib
import types
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, get_args, get_type_hints

from sites.launchers import Shape


class SiteError(Exception):
    """A machine cannot do what was asked of it, or a setting of it is wrong. One line."""


@dataclass(frozen=True, kw_only=True)
class Site(ABC):
    """A machine. Its fields are its settings; a setting without a default is required."""

    name: ClassVar[str]

    @abstractmethod
    def check(self) -> None:
        """Look for what the site needs here.

        Raises:
            SiteError: something is missing, such as the MPI launcher.
        """

    @abstractmethod
    def num_slots(self, shape: Shape) -> int:
        """How many tasks of this shape run at once.

        Raises:
            SiteError: not even one does; the message gives the equation.
        """

    @abstractmethod
    def node_share(self, shape: Shape) -> float:
        """How many nodes a task of this shape occupies: 0.5 if two share a node."""

    @abstractmethod
    def config(self, shape: Shape, run_dir: Path, memoizer: Any) -> Any:
        """The parsl.Config of a campaign; Parsl writes its own files to `run_dir`."""

    def sweep(self, folder: Path) -> int:
        """Take what a driver of this run folder left in the queue out of it.

        Returns:
            How many jobs there were.
        """
        return 0

    @abstractmethod
    def command(self, shape: Shape) -> list[str]:
        """The launch line of one task, up to the program."""

    @abstractmethod
    def environment(self, shape: Shape) -> dict[str, str]:
        """Variables for the ranks of one task."""


def threads(cores_per_rank: int) -> dict[str, str]:
    """Threads of a rank, for each library that would otherwise take all cores (3 to 11x slower)."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    return dict.fromkeys(names, str(cores_per_rank))


def build(site: type[Site], settings: Mapping[str, str]) -> Site:
    """A site from its settings as text, each converted to its field's type.

    Raises:
        SiteError: a setting is unknown, of the wrong type, or missing.
    """
    fields = {field.name: field for field in dataclasses.fields(site)}
    hints = get_type_hints(site)
    values: dict[str, Any] = {}
    for key, text in settings.items():
        if key not in fields:
            near = difflib.get_close_matches(key, fields, 1)
            hint = f"did you mean '{near[0]}'?" if near else f"it knows: {', '.join(fields)}"
            raise SiteError(f"--set {key}: site '{site.name}' has no such setting; {hint}")
        kind = _plain_type(hints[key])
        try:
            values[key] = kind(text)
        except ValueError:
            raise SiteError(f"--set {key}={text}: '{text}' is not {_SAID[kind]}") from None
    missing = [
        name
        for name, field in fields.items()
        if name not in values and field.default is dataclasses.MISSING
    ]
    if missing:
        example = " ".join(f"--set {name}=..." for name in missing)
        raise SiteError(f"site '{site.name}' needs {', '.join(missing)}: add {example}")
    return site(**values)


_SAID = {int: "a whole number", float: "a number", str: "a text"}


def _plain_type(hint: Any) -> Any:
    """`int | None` -> int."""
    if isinstance(hint, types.UnionType):
        return next(arg for arg in get_args(hint) if arg is not type(None))
    return hint
