"""Models of other frameworks: each has a file here, which is imported where such a model is met."""

from __future__ import annotations

import importlib
import importlib.util
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch

from apps.contract import Plain

# Where a framework is imported, the class of its models, and our file for them.
_KINDS = (
    ("keras", "Model", "apps.frameworks.keras_model"),
    ("lightning.pytorch", "LightningModule", "apps.frameworks.lightning_module"),
    ("pytorch_lightning", "LightningModule", "apps.frameworks.lightning_module"),
)

# What models are often written with: the extra that brings it.
_EXTRAS = {
    "keras": "keras",
    "lightning": "lightning",
    "pytorch_lightning": "lightning",
    "torchmetrics": "metrics",
    "torchvision": "vision",
    "timm": "vision",
    "torch_geometric": "graph",
}
_OF_TENSORFLOW = ("tensorflow", "tf_keras")
_KERAS_BACKENDS = ("jax", "tensorflow", "openvino")


def choose_backend() -> None:
    """Have Keras compute with PyTorch, where the user says nothing else; before it is imported."""
    os.environ.setdefault("KERAS_BACKEND", "torch")


@contextmanager
def new_model() -> Iterator[None]:
    """Within it Keras begins anew, on the CPU, with the seed of torch.

    It numbers its layers, and their numbers are in the names of weights; and it takes the seeds of
    initial weights from Python's random numbers, which an import may have moved on.
    """
    keras = sys.modules.get("keras")
    if keras is None:
        yield
        return
    keras.utils.clear_session(free_memory=False)
    random.seed(torch.initial_seed())
    np.random.seed(torch.initial_seed() % 2**32)
    with keras.device("cpu"):
        yield


def maker_of(model: Any) -> Callable[..., Any] | None:
    """`make(model, training, example)` of the framework that a model is of; None of plain torch."""
    for library, name, place in _KINDS:
        kind = getattr(sys.modules.get(library), name, None)
        if kind is not None and isinstance(model, kind):
            make: Callable[..., Any] = importlib.import_module(place).make
            return make
    return None


def is_layer(kind: type) -> bool:
    """Whether a class of modules is a layer of Keras, and so no model."""
    keras = sys.modules.get("keras")
    return keras is not None and issubclass(kind, keras.Layer) and not issubclass(kind, keras.Model)


def names_in(model: Any, side: Literal["input", "output"]) -> list[str]:
    """What a functional model of Keras calls its inputs or outputs; empty of others."""
    if not hasattr(model, "output_names"):
        return []
    names = model.output_names if side == "output" else [each.name for each in model.inputs]
    return keys_of(model, side) or list(names)


def keys_of(model: Any, side: Literal["input", "output"]) -> list[str]:
    """The keys of what it takes or gives, where that is a table."""
    structure = getattr(model, side) if hasattr(model, "output_names") else None
    return list(structure) if isinstance(structure, dict) else []


def compiled_optimizer(model: Any) -> dict[str, Plain] | None:
    """`training.optimizer` like that of a compiled Keras model, if it has one that torch has."""
    if not getattr(model, "compiled", False) or maker_of(model) is None:
        return None
    of_keras = importlib.import_module("apps.frameworks.keras_compiled")
    found: dict[str, Plain] | None = of_keras.torch_optimizer(model)
    return found


def remedy(error: BaseException) -> str | None:
    """What to install or set, where a model's file imports what is not there."""
    if not isinstance(error, ModuleNotFoundError):
        return None
    library = (error.name or "").partition(".")[0]
    chosen = os.environ.get("KERAS_BACKEND")
    if library in _KERAS_BACKENDS and chosen == library:
        return f"KERAS_BACKEND={chosen}: N3LO trains Keras models of the back end 'torch'; unset it"
    if library in _OF_TENSORFLOW:
        return (
            f"{library} is not used: N3LO trains models of Keras 3 on PyTorch; write 'import "
            "keras' and 'from keras import layers' in its place"
        )
    if library in _EXTRAS and importlib.util.find_spec(library) is None:
        return f"{library} is not installed in {sys.prefix}: pip install 'n3lo[{_EXTRAS[library]}]'"
    return None
