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
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import lowest_versions
from apps.contract import VERSION
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


def test_containers_copy_what_is_there_and_pin_what_we_pin():
    """They cannot be built where the tests run."""
    docker = (ROOT / "containers/Dockerfile").read_text()
    apptainer = (ROOT / "containers/n3lo.def").read_text()
    copied = {
        word for line in re.findall(r"^COPY (.*) \S+$", docker, re.M) for word in line.split()
    }
    assert copied == set(re.findall(r"^    (\S+) /opt/n3lo/\S+$", apptainer, re.M))
    assert all((ROOT / name).exists() for name in copied)
    assert {"apps", "sites", "workflow", "pyproject.toml", "README.md", "LICENSE"} <= copied
    for recipe in (docker, apptainer):
        (python,) = re.findall(r"^(?:FROM|From:) python:(\d+\.\d+)-slim$", recipe, re.M)
        assert python in SpecifierSet(PROJECT["requires-python"])
        assert "--constraint constraints.txt '.[run,mpi]'" in recipe
        assert "install_horovod.sh /usr/local/bin constraints.txt" in recipe


def test_the_citation_is_of_this_version_and_licence():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {
        "cff-version",
        "message",
        "title",
        "authors",
    } <= citation.keys()  # required by CFF 1.2.0
    assert citation["cff-version"] == "1.2.0"
    assert str(citation["version"]) == VERSION
    assert citation["license"] == PROJECT["license"]
    assert [each["name"] for each in citation["authors"]] == [
        each["name"] for each in PROJECT["authors"]
    ]
    assert "Apache License" in (ROOT / "LICENSE").read_text()


def test_the_lowest_versions_are_those_that_pyproject_allows():
    found = lowest_versions.lowest()
    assert found["torch"] == "2.11"
    for text in (*PROJECT["dependencies"], *EXTRAS["run"], *EXTRAS["mpi"]):
        requirement = Requirement(text)
        assert found[requirement.name] in requirement.specifier
        below = f"{found[requirement.name]}.dev0"
        assert below not in requirement.specifier
