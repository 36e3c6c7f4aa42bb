"""What an installation lacks, in one line: a look at results needs less than a training."""

from __future__ import annotations

import importlib.util
import sys

# The libraries of the extras of pyproject.toml, as they are imported.
# tests/test_packaging.py compares them.
LIBRARIES = {
    "run": (
        *("parsl", "torch", "mpi4py", "h5py", "pytorch_optimizer"),
        *("skopt", "sklearn", "matplotlib"),
    ),
    "monitor": (
        "ipywidgets",
        "anywidget",
        "itables",
        "threadpoolctl",
        "jupyterlab",
        "voila",
        "kaleido",
    ),
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
    "optuna": ("optuna", "cmaes"),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
    "tensorboard": ("tensorboard",),
    "keras": ("keras",),
    "lightning": ("lightning",),
    "metrics": ("torchmetrics",),
    "vision": ("torchvision", "timm"),
    "graph": ("torch_geometric",),
    "root": ("uproot",),
}
KNOWN = frozenset(name for libraries in LIBRARIES.values() for name in libraries)
OF_PROGRAMS = ("torch", "h5py")  # what every program of `apps` that uses a network needs


def require(*libraries: str) -> None:
    """See that libraries are there, without importing them.

    Raises:
        ModuleNotFoundError: one is not.
    """
    for name in libraries:
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)


def remedy(error: ModuleNotFoundError) -> str | None:
    """What to install, where an extra has what is missing."""
    library = (error.name or "").partition(".")[0]
    for extra, libraries in LIBRARIES.items():
        if library in libraries and importlib.util.find_spec(library) is None:
            return (
                f"{library} is not installed in {sys.prefix}: pip install 'n3lo[{extra}]' "
                f"(or 'make setup')"
            )
    return None
