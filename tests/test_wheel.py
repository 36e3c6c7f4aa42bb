"""What is built of the project can be installed without a checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from conftest import ROOT

LEFT_OUT = shutil.ignore_patterns(".*", "runs", "site", "build", "*.egg-info", "__pycache__")


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with the sdist, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    shutil.copytree(ROOT, source, ignore=LEFT_OUT)
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(source)],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return folder


def test_the_source_distribution_is_a_checkout(built):
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for name in ("Makefile", "LICENSE", "studies/jets.toml", "tests/conftest.py", "docs/index.md"):
        assert name in names
    assert not [name for name in names if "__pycache__" in name]


def test_the_wheel_has_all_of_the_packages_and_nothing_else(built):
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        metadata = archive.read(next(n for n in archive.namelist() if n.endswith("METADATA")))
    ours = {
        str(file.relative_to(ROOT))
        for package in ("workflow", "apps", "sites")
        for file in (ROOT / package).rglob("*.py")
    }
    assert names == ours
    assert b"License-Expression: Apache-2.0" in metadata


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory) -> Path:
    """Where the wheel is installed, without its dependencies."""
    folder = tmp_path_factory.mktemp("installed")
    (wheel,) = built.glob("*.whl")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index",
         "--target", str(folder), str(wheel)],
        timeout=120, check=True,
    )  # fmt: skip
    return folder


def n3lo(installed: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the installed program; its packages stand before those of the checkout."""
    return subprocess.run(
        [sys.executable, str(installed / "bin/n3lo"), *words], cwd=folder,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_the_installed_program_plans_a_study(installed, study_path, tmp_path):
    assert n3lo(installed, tmp_path, "--version").stdout.startswith("n3lo ")
    planned = n3lo(installed, tmp_path, "plan", str(study_path))
    assert planned.returncode == 0, planned.stderr
    assert "6 tasks" in planned.stdout


def test_without_a_checkout_a_study_has_to_be_named(installed, tmp_path):
    asked = n3lo(installed, tmp_path)
    assert asked.returncode == 2
    assert asked.stderr == (
        "n3lo: the following arguments are required: STUDY; see 'n3lo run --help'\n"
    )
    assert "studies/jets.toml" not in n3lo(installed, tmp_path, "run", "--help").stdout
