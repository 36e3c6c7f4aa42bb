"""A study that is being written: values with the reason for each, as the text of a TOML file."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field

from apps.contract import Plain
from workflow import toml

WIDTH = 100


@dataclass
class Draft:
    """Keys by their path, in the order in which they are set within each section."""

    heading: str
    values: dict[tuple[str, ...], Plain] = field(default_factory=dict)
    reasons: dict[tuple[str, ...], str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # for the user, besides the study

    def set(self, key: str, value: Plain, reason: str = "") -> None:
        """
        Args:
            key: "training.epochs", or "search.space.PATH" of a dimension.
            value: what TOML can hold.
            reason: where it comes from, for a comment.
        """
        path = tuple(key.split(".", 2 if key.startswith("search.space.") else 1))
        self.values[path] = value
        self.reasons[path] = reason

    def note(self, line: str) -> None:
        self.notes.append(line)

    @property
    def text(self) -> str:
        """The TOML file."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        yield from (f"# {line}".rstrip() for line in self.heading.splitlines())
        sections = dict.fromkeys(path[:-1] for path in self.values)
        for section in sorted(sections, key=len) if () in sections else sections:
            if section:
                yield from ("", f"[{'.'.join(section)}]")
            for path, value in self.values.items():
                if path[:-1] == section:
                    yield from _assignment(path[-1], value, self.reasons[path])


def _assignment(key: str, value: Plain, reason: str) -> Iterator[str]:
    """A line with its comment behind it, or above it where that is too long."""
    line = f"{toml.key(key)} = {toml.value(value)}"
    if isinstance(value, list) and len(line) > WIDTH:
        members = (f"    {toml.value(each)}," for each in value)
        line = "\n".join([f"{toml.key(key)} = [", *members, "]"])
    behind = f"{line.ljust(40)}  # {reason}"
    if not reason:
        yield line
    elif len(behind) <= WIDTH and "\n" not in line:
        yield behind
    else:
        yield from (
            f"# {part}" for part in textwrap.wrap(reason, WIDTH - 2, break_on_hyphens=False)
        )
        yield line
