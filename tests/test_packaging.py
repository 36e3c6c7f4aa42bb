"""The ways to set up say the same thing."""

from __future__ import annotations

import itertools
import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_conda_environment_asks_for_what_pyproject_asks_for():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    by_pip = next(entry["pip"] for entry in environment if isinstance(entry, dict))
    by_conda = [entry for entry in environment if isinstance(entry, str)]
    assert sorted(by_pip) == sorted(PROJECT["dependencies"])
    assert set(PROJECT["optional-dependencies"]["mpi"]) <= set(by_conda)
    assert f"python{PROJECT['requires-python']}" in by_conda


def test_every_pin_lies_in_the_range_that_pyproject_allows():
    from packaging.requirements import Requirement

    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    )
    extras = PROJECT["optional-dependencies"].values()
    asked = [Requirement(text) for text in [*PROJECT["dependencies"], *itertools.chain(*extras)]]
    for requirement in asked:
        if requirement.name in pins:
            assert pins[requirement.name] in requirement.specifier, requirement
    missing = {r.name for r in map(Requirement, PROJECT["dependencies"])} - pins.keys()
    assert not missing


def test_the_links_of_the_readme_lead_somewhere():
    text = (ROOT / "README.md").read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert target.startswith("http") or (ROOT / target).exists(), target
