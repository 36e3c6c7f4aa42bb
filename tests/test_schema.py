"""The JSON schema and the page of all keys: from the classes that check a study, and up to date."""

from __future__ import annotations

import dataclasses
import json
import os
import tomllib

import jsonschema
import pytest
from conftest import ROOT, STUDY

from apps.contract import Data, Layout, Training
from workflow import cli, schema
from workflow.space import Real

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


def test_a_key_has_type_unit_default_and_meaning():
    keys = {key.name: key for key in schema.keys(Layout)}
    assert keys["walltime_min"] == schema.Key(
        name="walltime_min",
        type="number",
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
