"""The ways to set up say the same thing."""

from __future__ import annotations

import importlib.metadata
import itertools
import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from workflow import extras

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def test_the_conda_environment_asks_for_what_pyproject_asks_for():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    by_pip = next(entry["pip"] for entry in environment if isinstance(entry, dict))
    by_conda = [entry for entry in environment if isinstance(entry, str)]
    assert sorted(by_pip) == sorted([*PROJECT["dependencies"], *EXTRAS["run"]])
    assert set(EXTRAS["mpi"]) <= set(by_conda)
    assert f"python{PROJECT['requires-python']}" in by_conda


def test_every_pin_lies_in_the_range_that_pyproject_allows():
    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    )
    texts = [*PROJECT["dependencies"], *itertools.chain(*EXTRAS.values())]
    asked = [Requirement(text) for text in texts]
    for requirement in asked:
        if requirement.name in pins:
            assert pins[requirement.name] in requirement.specifier, requirement
    needed = [*PROJECT["dependencies"], *EXTRAS["run"], *EXTRAS["monitor"]]
    assert not {Requirement(text).name for text in needed} - pins.keys()


@pytest.mark.parametrize("extra", extras.LIBRARIES)
def test_what_is_missing_is_looked_for_in_the_extra_that_has_it(extra):
    """By the name that it is imported by, which is not always that of its package."""
    packages = importlib.metadata.packages_distributions()
    imported = {name for library in extras.LIBRARIES[extra] for name in packages[library]}
    asked = {Requirement(text).name for text in EXTRAS[extra]}
    assert set(map(canonicalize_name, imported)) == asked


def test_the_links_of_the_readme_lead_somewhere():
    text = (ROOT / "README.md").read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert target.startswith("http") or (ROOT / target).exists(), target
