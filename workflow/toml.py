"""TOML as we write it; Python reads it, and does not write it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from apps.contract import N3LOError


def value(of: Any, where: str = "") -> str:
    """A value on one line.

    Args:
        where: its dotted key, for the error.

    Raises:
        N3LOError: TOML, or a study, has no such value.
    """
    of = plain(of)
    if isinstance(of, bool):
        return "true" if of else "false"
    if isinstance(of, str):  # JSON's texts are TOML's, but for the one character that it leaves
        return json.dumps(of, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(of, int) or (isinstance(of, float) and math.isfinite(of)):
        return repr(of)
    if isinstance(of, list | tuple):
        return f"[{', '.join(value(each, where) for each in of)}]"
    if isinstance(of, Mapping):
        inside = ", ".join(
            f"{key(name)} = {value(each, f'{where}.{name}')}"
            for name, each in of.items()
            if each is not None
        )
        return f"{{ {inside} }}" if inside else "{}"
    raise N3LOError(
        f"{where or 'a study'}: {of!r} is a {type(of).__name__}; a study holds numbers that are "
        "finite, texts, true or false, and lists and tables of them"
    )


def plain(of: Any) -> Any:
    """A number, or an array, of NumPy or pandas as Python's."""
    return of.tolist() if hasattr(of, "tolist") else of


def key(name: str) -> str:
    """Bare where it may be.

    Raises:
        N3LOError: it is no text.
    """
    if not isinstance(name, str):
        raise N3LOError(f"{name!r} names no value of a study: write a text")
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else value(name)


def text(content: Mapping[str, Any]) -> str:
    """A whole file: sections in brackets, and what is in them on a line each; None is left out.

    Raises:
        N3LOError: it holds what TOML does not.
    """
    return "\n".join(_lines(content, "")).strip() + "\n"


def _lines(content: Mapping[str, Any], path: str) -> Iterator[str]:
    sections = {name: each for name, each in content.items() if _is_section(each, path)}
    for name, each in content.items():
        if name not in sections and each is not None:
            yield f"{key(name)} = {value(each, f'{path}.{name}'.lstrip('.'))}"
    for name, each in sections.items():
        inner = f"{path}.{key(name)}".lstrip(".")
        yield from ("", f"[{inner}]", *_lines(each, inner))


def _is_section(each: Any, path: str) -> bool:
    """Tables of the file and of its sections; those further in stay on a line."""
    return isinstance(each, Mapping) and path.count(".") == 0 and (not path or _is_nested(each))


def _is_nested(table: Mapping[str, Any]) -> bool:
    return any(isinstance(each, Mapping) for each in table.values())
