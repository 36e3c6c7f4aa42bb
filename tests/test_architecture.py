"""A folder is a process: its imports prove where it runs (design, section 2)."""

from __future__ import annotations

import ast
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

import apps
import sites
import workflow

ROOT = Path(__file__).resolve().parent.parent
OURS = {"workflow", "apps", "sites"}
STANDARD = sys.stdlib_module_names
DRIVER = {"parsl", "pandas", "numpy", "scipy", "pydantic", "pydantic_core", "rich", "psutil"}
SEARCH = {"skopt", "sklearn", "scipy", "optuna", "cmaes"}
# What it writes for them is imported by who asks for it; the event files are as a training's.
EXPORTS = {"h5py", "optuna", "mlflow", "sqlalchemy", "tensorboard", "apps.tensorboard"}
NOTEBOOK = {"plotly", "ipywidgets", "anywidget", "itables", "traitlets", "threadpoolctl"}
PHYSICS = {"scipy", "sklearn"}
FORMATS = {"pyarrow", "uproot", "awkward"}  # of files that are read
RANKS = {"torch", "horovod", "mpi4py", "h5py", "numpy", "pytorch_optimizer", "onnxruntime"}


def imported(path: Path) -> set[str]:
    """The modules that a file imports anywhere in it, by their full names."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
    return {name for name in names if name.partition(".")[0] not in STANDARD}


def allowed(path: Path) -> set[str]:
    """What a file may import, as full names or packages."""
    inside = path.relative_to(ROOT)
    special = {
        "run_workflow.py": {"workflow.cli"},
        "apps/contract.py": set(),
        **{f"apps/formats/{name}.py": {"apps", "numpy", *FORMATS} for name in ("parquet", "root")},
        **{
            f"apps/frameworks/{name}.py": {"apps", "keras", "numpy", "torch"}
            for name in ("keras_compiled", "keras_model")
        },
        "apps/frameworks/lightning_module.py": {"apps", "torch", "torchmetrics"},
        "apps/launch.py": {"apps", "apps.contract"},
        "apps/room.py": set(),
        "apps/scout.py": {"apps", "apps.contract", "apps.launch"},
        "apps/rules.py": {"apps.contract"},
        "apps/staging.py": {"apps.contract"},
        "apps/tensorboard.py": {"tensorboard"},
        "apps/physics/figures.py": {"apps", "numpy", "matplotlib"},
        "sites/launchers.py": set(),
    }
    if str(inside) in special:
        return special[str(inside)]
    folder = inside.parts[0]
    if folder == "workflow":
        of_part = {
            **{"search": SEARCH, "exports": EXPORTS, "figures": {"plotly"}, "page.py": {"plotly"}},
            **{"monitor.py": NOTEBOOK, "widgets.py": NOTEBOOK, "api.py": {"threadpoolctl"}},
            **{"drawing.py": {"kaleido"}, "tables.py": {"pyarrow"}},
        }
        return (
            {"workflow", "sites", "apps"}
            | {"apps.contract", "apps.launch", "apps.rules", "apps.scout", "apps.staging"}
            | DRIVER
            | of_part.get(inside.parts[1], set())
        )
    physics = PHYSICS if "physics" in inside.parts else set()
    return {"sites": {"sites", "parsl"}, "apps": {"apps"} | RANKS | physics}[folder]


FILES = [
    ROOT / "run_workflow.py",
    *(file for name in sorted(OURS) for file in sorted((ROOT / name).rglob("*.py"))),
]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_imports_only_what_its_process_may(path):
    permitted = allowed(path)
    for name in imported(path):
        if name == "apps":  # the package itself, for its place; it holds nothing
            continue
        package = name.partition(".")[0]
        assert (
            name in permitted
            or (package in permitted and package != "apps")
            or (package == "apps" and path.is_relative_to(ROOT / "apps") and "apps" in permitted)
        ), f"{path.relative_to(ROOT)} must not import {name}"


def test_the_preflight_does_without_mpi():
    """It runs on login nodes, where importing mpi4py may crash; frameworks take seconds."""
    code = (
        "import sys, apps.check;"
        "assert not {'mpi4py', 'horovod', 'keras', 'lightning'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


def test_the_driver_starts_without_the_libraries_of_the_ranks():
    code = (
        "import sys, workflow.session, workflow.cli;"
        "import workflow.exports;"
        "assert not {'torch', 'mpi4py', 'h5py', 'horovod', 'skopt', 'optuna'} & set(sys.modules);"
        "assert not {'mlflow', 'sqlalchemy', 'tensorboard'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


def test_of_the_machines_only_the_chosen_one_is_loaded():
    code = (
        "import sys; from workflow import cli; cli.get('local', {});"
        "assert not {'sites.slurm', 'sites.lsf', 'sites.pbs', 'sites.inside'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


def test_the_import_packages_are_this_checkout():
    """Their names are generic; another distribution could shadow them."""
    for package in (workflow, apps, sites):
        assert Path(package.__file__).resolve().parent.parent == ROOT
    assert importlib.metadata.version("n3lo")


def test_no_machine_is_named_outside_sites():
    names = ("summit", "piz_daint", "frontier", "perlmutter", "polaris", "jsrun", "aprun")
    for path in [*(ROOT / "workflow").rglob("*.py"), *(ROOT / "apps").rglob("*.py")]:
        text = path.read_text().lower()
        assert not [name for name in names if name in text], path
