"""The JSON schema and the page of all keys: from the classes that check a study, and up to date."""

from __future__ import annotations

import dataclasses
import json
import os
import tomllib
from pathlib import Path

import jsonschema
import pytest
from conftest import ROOT, STUDY

from apps.contract import Data, Layout, N3LOError, Training, ranges
from workflow import cli, schema, study, toml
from workflow.space import Real
from workflow.study import Study

SCHEMA = ROOT / "studies" / schema.NAME
PAGE = ROOT / "docs" / "reference" / "study.md"
STUDIES = sorted((ROOT / "studies").rglob("*.toml"))
CLASSES = [*dict(schema.sections()).values(), *schema.DIMENSIONS]


@pytest.mark.parametrize("section", CLASSES, ids=lambda each: each.__name__)
def test_every_key_of_every_section_says_what_it_means(section):
    silent = [key.name for key in schema.keys(section) if not key.meaning]
    assert not silent, f"add a comment at {section.__name__}.{', '.join(silent)}"


@pytest.mark.parametrize(
    ("path", "text"), [(SCHEMA, schema.text), (PAGE, schema.markdown)], ids=["schema", "page"]
)
def test_the_schema_and_the_page_are_those_of_the_classes(path, text):
    """`N3LO_GOLDEN=write pytest tests/test_schema.py` writes them anew."""
    if os.environ.get("N3LO_GOLDEN") == "write":
        path.write_text(text())
    assert path.read_text() == text()


@pytest.mark.parametrize("path", STUDIES, ids=lambda each: str(each.relative_to(ROOT)))
def test_a_shipped_study_fits_the_schema_that_its_first_line_names(path):
    directive, name = path.read_text().splitlines()[0].split()
    assert directive == "#:schema"
    named = json.loads((path.parent / name).read_text())
    checker = jsonschema.Draft202012Validator(named)
    checker.validate(tomllib.loads(path.read_text()))


@pytest.fixture(scope="module")
def checker():
    of_now = schema.json_schema()
    jsonschema.Draft202012Validator.check_schema(of_now)
    return jsonschema.Draft202012Validator(of_now)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("epochs = 2", "epoch = 2"),
        ("epochs = 2", 'epochs = "two"'),
        ('strategy = "local"', 'strategy = "locl"'),
        ('targets = "y"\n', ""),
        ('type = "real", ', ""),
        ('type = "int"', 'type = "integer"'),
        ('goal = "min"', 'goal = "smallest"'),
    ],
)
def test_an_editor_marks_what_a_run_would_refuse(checker, old, new):
    assert checker.is_valid(tomllib.loads(STUDY))
    assert old in STUDY
    assert not checker.is_valid(tomllib.loads(STUDY.replace(old, new)))


@pytest.mark.parametrize(
    "section", [each for each in CLASSES if ranges(each)], ids=lambda each: each.__name__
)
def test_an_editor_and_a_run_know_the_same_numbers_of_every_key_with_a_range(checker, section):
    """At each end, and next to it on both sides."""
    path = next(path for path, each in schema.sections() if each is section)
    described = checker.schema if section is Study else checker.schema["$defs"][section.__name__]
    validator = jsonschema.Draft202012Validator(checker.schema)
    for name, allowed in ranges(section).items():
        number = {"integer": int, "number": float}[described["properties"][name]["type"]]
        step = 1 if number is int else 1 / 64
        ends = [end for end in vars(allowed).values() if end is not None]
        for value in (number(end + offset) for end in ends for offset in (-step, 0, step)):
            content = tomllib.loads(STUDY)
            table = content
            for part in filter(None, path.split(".")):
                table = table.setdefault(part, {})
            table[name] = value
            refused = ""
            try:
                study.parse(toml.text(content), Path("small.toml"))
            except N3LOError as error:
                refused = str(error)
            said = f"{name}: {value} is not {allowed}"
            assert validator.is_valid(content) == (said not in refused), (path, name, value)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('name = "small"', 'name = "a/b"'),
        ('name = "small"', 'name = ""'),
        ('{ name = "sgd", lr = 0.1 }', "{ lr = 1 }"),
        ('["events.h5"]', "[]"),
        (STUDY[STUDY.index("[search.space]") :], "[search.space]"),
    ],
)
def test_what_is_no_number_is_refused_by_both_too(checker, old, new):
    assert old in STUDY
    text = STUDY.replace(old, new)
    assert not checker.is_valid(tomllib.loads(text))
    with pytest.raises(N3LOError):
        study.parse(text, Path("small.toml"))


def test_a_key_has_type_unit_default_and_meaning():
    keys = {key.name: key for key in schema.keys(Layout)}
    assert keys["walltime_min"] == schema.Key(
        name="walltime_min",
        type="number, above 0",
        unit="minutes",
        default="`60.0`",
        meaning="a task that runs longer is stopped and failed",
    )
    of_data = {key.name: key for key in schema.keys(Data)}
    assert of_data["files"].default == "*required*"
    assert of_data["memory_gb"].default == ""
    assert of_data["fold_by"].type == '"events", "files"'
    of_training = {key.name: key for key in schema.keys(Training)}
    assert of_training["optimizer"].default == '`{ name = "adam", lr = 0.001 }`'


def test_a_comment_may_stand_behind_its_field_or_above_it():
    comments = schema._comments(
        "class A:\n    # of both\n    # lines\n    a: int = 1\n"
        "    b: int = 2  # behind\n    c: int\n"
    )
    assert comments == {"a": "of both lines", "b": "behind", "c": ""}
    assert schema.meaning(Real, "when").startswith("active only if")  # of the class above


def test_the_schema_says_defaults_as_toml_can_write_them(checker):
    training = checker.schema["$defs"]["Training"]["properties"]
    assert training["optimizer"]["default"] == {"name": "adam", "lr": 1e-3}
    assert training["clip_norm"]["type"] == "number"  # null is nothing that TOML has
    fields = {field.name for field in dataclasses.fields(Training)}
    assert {name for name, key in training.items() if key["description"]} == fields


def test_the_command_prints_the_schema_or_writes_it(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == schema.json_schema()
    assert cli.main(["schema", "--to", "there.json"]) == 0
    assert capsys.readouterr().out == "there.json\n"
    assert (tmp_path / "there.json").read_text() == schema.text()
    assert cli.main(["schema", "--to", str(tmp_path)]) == 2
    assert "is a folder" in capsys.readouterr().err
