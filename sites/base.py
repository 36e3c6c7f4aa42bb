"""What a site is: a machine's settings, and how tasks of a given shape run there."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from sites.launchers import Shape
from sites.script import Pilots


class SiteError(Exception):
    """A machine cannot do what was asked of it, or a setting of it is wrong. One line."""

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows of it: the line, and no traceback."""
        return [f"n3lo: {self}"]


class SettingError(SiteError):
    """A setting has a value that it cannot have."""

    def __init__(self, name: str, value: object, reason: str) -> None:
        super().__init__(f"--set {name}={value}: {reason}")
        self.name = name
        self.reason = reason


@dataclass(frozen=True, kw_only=True)
class Site(ABC):
    """A machine. Its fields are its settings; a setting without a default is required.

    The docstring's first line is the machine's in `sites list`. A field says what it means and in
    which unit as `Annotated[int, "..."]`; a class below need not say it again.
    """

    name: ClassVar[str]
    fixed: ClassVar[Mapping[str, Any]] = {}  # settings that are not for the user to say
    has_queue: ClassVar[bool] = False  # its pilots are jobs that wait
    programs: ClassVar[tuple[str, ...]]  # of the machine, which the driver has to find on PATH

    @classmethod
    def here(cls) -> tuple[type[Site], dict[str, int]]:
        """The site as it is around this process, and the settings that it has there.

        Raises:
            SiteError: it is not here.
        """
        return cls, {}

    @property
    def end(self) -> float:
        """When the site can no more be used, as of time.time()."""
        return math.inf

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
        """The parsl.Config of a campaign; Parsl writes its own files to `run_dir`.

        Args:
            shape: of the smallest tasks; as many workers are started as there is room for.
        """

    def pilots_of(self, shape: Shape, run_dir: Path) -> Pilots | None:
        """What `config` would have in the queue; None without one. Nothing is looked for here."""
        return None

    @abstractmethod
    def need(self, shape: Shape) -> dict[str, int]:
        """What a task of this shape takes of a pilot: an `apps.room.Need` as a dict."""

    def foresee(self, run_dir: Path, least_s: float | None) -> None:  # noqa: B027  not all have use
        """Be told the least time, in seconds, for which a task is worth starting; None: unknown.

        Pilots to come begin none with less than that left.
        """

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
