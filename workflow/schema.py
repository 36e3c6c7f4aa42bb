"""What a study may hold, as data: a JSON schema for editors, and a page for readers.

The meaning of a key is the comment at its field, in the class that checks it; its type and default
are those of that field. There is no second place for any of them.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import json
import re
import textwrap
import tokenize
import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter

from apps.contract import Range, ranges
from workflow import toml, whole
from workflow.space import Choice, Integer, Ordinal, Real
from workflow.study import Study

NAME = "study.schema.json"
TITLE = "A study of N3LO"
END_KEYWORDS = {  # of a Range
    **{"at_least": "minimum", "above": "exclusiveMinimum"},
    **{"at_most": "maximum", "below": "exclusiveMaximum"},
}
DIMENSIONS: tuple[type, ...] = (Real, Integer, Choice, Ordinal)

# What the number of a key counts or measures, by the key's last word or by all of it.
UNITS = {
    **{"min": "minutes", "minutes": "minutes", "hours": "hours", "node_hours": "node hours"},
    **{"gb": "GB", "size": "events", "events": "events", "epochs": "epochs"},
    **{"patience": "epochs", "fraction": "share", "density": "share", "trials": "trials"},
    **{"workers": "workers", "masters": "masters", "ranks": "ranks", "folds": "folds"},
    **{"per_worker": "ranks", "per_stage": "ranks", "cores_per_rank": "cores"},
    **{"gpus_per_rank": "GPUs", "lanes": "ranks", "accumulate": "batches", "failures": "trials"},
    **{"no_improvement": "trials", "sync_every": "batches", "average_every": "updates"},
    **{"pass_on_every": "exchanges", "start_after": "updates", "unit_parameters": "parameters"},
    **{"num_parallel": "trials", "prepare_ahead": "proposals", "min_folds": "folds"},
}

SCALARS = {str: "text", int: "integer", float: "number", bool: "true or false", Any: "any"}


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key of a section, as a reader needs it."""

    name: str
    type: str
    unit: str
    default: str
    meaning: str


# -- from the classes ------------------------------------------------------------------------------


@cache
def meanings(section: type) -> dict[str, str]:
    """What the comments at the fields of a class say, by field; its base classes' too.

    A comment stands behind its field, or on lines of its own right above it.
    """
    found: dict[str, str] = {}
    for each in reversed(section.__mro__):
        if dataclasses.is_dataclass(each):
            found |= _comments(textwrap.dedent(inspect.getsource(each)))
    return found


def _comments(source: str) -> dict[str, str]:
    """The comments at the fields of the class in `source`."""
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    texts = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokens
        if token.type == tokenize.COMMENT
    }
    lines = source.splitlines()
    [definition] = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for node in definition.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            first, last = node.lineno, node.end_lineno or node.lineno
            while lines[first - 2].lstrip().startswith("#"):
                first -= 1
            said = [texts[line] for line in range(first, last + 1) if line in texts]
            found[node.target.id] = " ".join(said)
    return found


def meaning(section: type, name: str) -> str:
    """As a study's author reads it: TOML has no None."""
    text = meanings(section).get(name, "")
    return re.sub(r"\bNone\b", "left out", text).replace("OWN_LOSS:", '"own":')


def unit(name: str) -> str:
    """Of a key; empty where its number has none."""
    parts = name.split("_")
    endings = ("_".join(parts[start:]) for start in range(len(parts)))
    return next((UNITS[ending] for ending in endings if ending in UNITS), "")


def keys(section: type) -> list[Key]:
    """The keys of a section, in the order of its class."""
    hints = get_type_hints(section, include_extras=True)
    return [
        Key(
            name=field.name,
            type=_type_text(hints[field.name]),
            unit=unit(field.name) if _is_number(hints[field.name]) else "",
            default=_default_text(section, field),
            meaning=meaning(section, field.name),
        )
        for field in dataclasses.fields(section)
    ]


def sections(section: type = Study, path: str = "") -> Iterator[tuple[str, type]]:
    """All sections of a study by their dotted path, each before those in it."""
    yield path, section
    for name, hint in get_type_hints(section).items():
        for inner in _sections_in(hint):
            yield from sections(inner, f"{path}.{name}".lstrip("."))


def _sections_in(hint: Any) -> list[type]:
    """The one section that a field holds, if it does."""
    found = [each for each in (hint, *_members(hint)) if _is_section(each)]
    return found[:1]


def _members(hint: Any) -> tuple[Any, ...]:
    """Of a union."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else ()


def _is_section(hint: Any) -> bool:
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def _is_number(hint: Any) -> bool:
    hint = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    return any(each in (int, float) for each in (hint, *_members(hint)))


def _type_text(hint: Any) -> str:
    """A type in words."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        has_range = isinstance(args[1], Range)
        return f"{_type_text(args[0])}, {args[1]}" if has_range else "one of the dimensions below"
    if origin is Literal:
        return ", ".join(json.dumps(value) for value in args)
    if origin is list:
        return f"list of {_type_text(args[0])}"
    if origin is dict:
        return f"table of {_type_text(args[1])}"
    if members := _members(hint):
        if {bool, int, float, str} <= set(members):
            return "number, text, true or false"
        return " or ".join(_type_text(each) for each in members if each is not types.NoneType)
    if _is_section(hint):
        return "a table, below"
    return SCALARS[hint]


def _default_text(section: type, field: dataclasses.Field[Any]) -> str:
    default = _default(field)
    tells_which = section in DIMENSIONS and field.name == "type"
    if default is dataclasses.MISSING or tells_which:
        return "*required*"
    if default is None:
        return ""
    if _is_section(type(default)):
        return "as below"
    return f"`{toml.value(default)}`"


def _default(field: dataclasses.Field[Any]) -> Any:
    made = field.default_factory
    return field.default if made is dataclasses.MISSING else made()


# -- for editors -----------------------------------------------------------------------------------


def json_schema() -> dict[str, Any]:
    """The JSON schema of a study: draft 2020-12, with a description and a default of each key."""
    schema = _without_null(TypeAdapter(Study).json_schema())
    of_class = {Study.__name__: schema, **schema["$defs"]}
    classes = {each for _, each in sections()} | set(DIMENSIONS)
    for section in classes | _listed_sections(classes):
        _describe(of_class[section.__name__], section)
    for each in DIMENSIONS:
        of_class[each.__name__]["required"].append("type")  # it says which of them a table is
    del schema["title"]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": TITLE,
        **schema,
    }


def text() -> str:
    """The JSON schema as it is written to a file."""
    return json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n"


def write_beside(study: Path) -> None:
    """Write the schema that a study's first line names, unless there is one of somebody else's."""
    path = study.with_name(NAME)
    if not path.exists() or f'"title": "{TITLE}"' in path.read_text(encoding="utf-8"):
        whole.write_whole(path, text())


def _listed_sections(classes: set[type]) -> set[type]:
    """Those that only a list holds."""
    hints = [hint for each in classes for hint in get_type_hints(each).values()]
    return {arg for hint in hints for arg in get_args(hint) if _is_section(arg)} - classes


def _describe(schema: dict[str, Any], section: type) -> None:
    schema["description"] = inspect.cleandoc(section.__doc__ or "")
    for field in dataclasses.fields(section):
        key = schema["properties"][field.name]
        key.pop("title", None)
        counted = unit(field.name) if key.get("type") in ("integer", "number") else ""
        said = meaning(section, field.name)
        key["description"] = f"{said} [{counted}]" if counted else said
        default = _default(field)
        is_plain = default not in (dataclasses.MISSING, None) and not _is_section(type(default))
        if is_plain:
            key["default"] = default
        if allowed := ranges(section).get(field.name):
            ends = {END_KEYWORDS[name]: end for name, end in vars(allowed).items()}
            key |= {keyword: end for keyword, end in ends.items() if end is not None}
        key |= field.metadata.get("schema", {})


def _without_null(schema: Any) -> Any:
    """TOML has no null: what may be None may be left out."""
    if isinstance(schema, list):
        return [_without_null(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {
        key: _without_null(value)
        for key, value in schema.items()
        if not (key == "default" and value is None)
    }
    choices = kept.get("anyOf")
    if choices is not None and {"type": "null"} in choices:
        choices.remove({"type": "null"})
        if len(choices) == 1:
            del kept["anyOf"]
            kept |= choices[0]
    return kept


# -- for readers -----------------------------------------------------------------------------------


def markdown() -> str:
    """The page with every key of a study: type, unit, default, meaning."""
    parts = [
        "# Every key of a study",
        "A study is one TOML file. Keys without a default are required; an unknown key, or a value "
        "of another type, is an error that names the file and the line. This page and "
        f"`studies/{NAME}`, with which an editor completes and checks a study, are made from the "
        "classes that check it (`N3LO_GOLDEN=write pytest tests/test_schema.py`).",
    ]
    for path, section in sections():
        depth = "##" if path.count(".") == 0 else "###"
        heading = f"{depth} `[{path}]`" if path else "## The file"
        parts += [heading, _prose(section), _table(section)]
    parts += [
        "## A dimension of `[search.space]`",
        "Each key of `[search.space]` is the dotted path of a value of the study, such as "
        '`"training.optimizer.lr"`; its value is one of these tables.',
    ]
    for dimension in DIMENSIONS:
        name = dimension.__dataclass_fields__["type"].default  # type: ignore[attr-defined]
        parts += [f'### `type = "{name}"`', _prose(dimension), _table(dimension)]
    return "\n\n".join(parts) + "\n"


def _prose(section: type) -> str:
    return inspect.cleandoc(section.__doc__ or "")


def _table(section: type) -> str:
    rows = [
        f"| `{key.name}` | {_cell(key.type)} | {key.unit} | {_cell(key.default)} "
        f"| {_cell(key.meaning)} |"
        for key in keys(section)
    ]
    return "\n".join(["| key | type | unit | default | meaning |", "|---|---|---|---|---|", *rows])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
