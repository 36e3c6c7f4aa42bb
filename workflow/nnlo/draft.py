"""A study that is being written: values with the reason for each, as the text of a TOML file."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from apps.contract import Plain

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
    line = f"{_key(key)} = {toml(value)}"
    if isinstance(value, list) and len(line) > WIDTH:
        line = "\n".join([f"{_key(key)} = [", *(f"    {toml(each)}," for each in value), "]"])
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


def toml(value: Plain) -> str:
    """A value as TOML writes it, on one line."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(k)} = {toml(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else toml(name)
