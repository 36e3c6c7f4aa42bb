"""Model files that were written for NNLO or mpi_learn, as models of a study.

`n3lo import-nnlo` writes a small file that calls these functions, where a model file needs them.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn

# What such files import, and what a host without NNLO lacks.
PACKAGES = ("nnlo", "mpi_learn", "mpi_opt", "skopt", "setGPU", "gpustat")


@contextmanager
def stand_ins() -> Iterator[list[str]]:
    """While a model file is imported: what stands in for NNLO's packages that are not installed.

    Yields:
        The modules that were missing, as they are asked for.
    """
    finder = Finder()
    sys.meta_path.append(finder)  # last: what is installed is found before
    try:
        yield finder.asked
    finally:
        sys.meta_path.remove(finder)


def adapted(get_model: Callable[..., Any]) -> Callable[..., nn.Module]:
    """A `get_model` of NNLO whose model a strategy can move to its device.

    - `.cuda()` in a constructor does nothing.
    - Tensors that are plain attributes of a module become buffers, which move with it.
    """

    @functools.wraps(get_model)
    def model(**args: Any) -> nn.Module:
        with stand_ins(), on_the_host():
            made = get_model(**args)
        if isinstance(made, nn.Module):
            for name in plain_tensors(made):
                _keep_as_buffer(made, name)
        return made

    return model


def compiled(get_model: Callable[..., Any], loss: str) -> Callable[..., Any]:
    """A `get_model` of Keras whose model has the loss and the metric that NNLO gave it."""

    @functools.wraps(get_model)
    def model(**args: Any) -> Any:
        with stand_ins():
            made = get_model(**args)
        made.compile(loss=loss, metrics=["accuracy"])
        return made

    return model


def built_by(builder: type) -> Callable[[], Any]:
    """The `get_model` of a class that was derived from NNLO's ModelBuilder."""

    def get_model() -> Any:
        return builder(None).build_model()

    return get_model


def collated(adaptor: Callable[[np.ndarray], Any]) -> Callable[[torch.Tensor], Any]:
    """NNLO's function of the features, which takes arrays, as one of tensors."""

    def collate(inputs: torch.Tensor) -> Any:
        made = adaptor(inputs.cpu().numpy())
        parts = made if isinstance(made, list | tuple) else [made]
        tensors = [torch.from_numpy(np.ascontiguousarray(part)).to(inputs.device) for part in parts]
        return tensors if isinstance(made, list | tuple) else tensors[0]

    return collate


@contextmanager
def on_the_host() -> Iterator[list[str]]:
    """Let `.cuda()` of modules and tensors do nothing.

    Yields:
        A word for each call that did nothing.
    """
    calls: list[str] = []

    def stay(value: Any, *_: Any, **__: Any) -> Any:
        calls.append("cuda")
        return value

    with mock.patch.object(nn.Module, "cuda", stay), mock.patch.object(torch.Tensor, "cuda", stay):
        yield calls


def plain_tensors(model: nn.Module) -> list[str]:
    """The tensors of a model that are neither parameters nor buffers, by dotted name."""
    return [
        f"{prefix}.{name}".lstrip(".")
        for prefix, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    ]


def _keep_as_buffer(model: nn.Module, name: str) -> None:
    prefix, _, attribute = name.rpartition(".")
    module = model.get_submodule(prefix)
    value = getattr(module, attribute)
    delattr(module, attribute)
    module.register_buffer(attribute, value.detach(), persistent=False)


class Finder(MetaPathFinder):
    """Finds a stand-in for each module of `PACKAGES`."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in PACKAGES:
            return None
        self.asked.append(fullname)
        return ModuleSpec(fullname, _Loader(), is_package=True)


class _Loader(Loader):
    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing in it; see `_Module.__getattr__`."""


class _Module(types.ModuleType):
    """Has every name: those of `KNOWN`, and for the others something that does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return KNOWN.get(name) or Nothing(f"{self.__name__}.{name}")


class Nothing:
    """Can be called and looked into, and says once that nothing comes of it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *_: Any, **__: Any) -> Nothing:
        warnings.warn(f"{self._name} is NNLO's and does nothing here", stacklevel=2)
        return self

    def __getattr__(self, name: str) -> Nothing:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing(f"{self._name}.{name}")


class ModelBuilder:
    """NNLO's: a class derived from it gives its model by `build_model()`."""

    def __init__(self, comm: Any = None, *_: Any, **__: Any) -> None:
        self.comm = comm


class _Dimension:
    """One of scikit-optimize's, as far as a model file writes it."""

    def __init__(self, name: str | None, **facts: Any) -> None:
        self.name = name
        vars(self).update(facts)


class Real(_Dimension):
    def __init__(
        self, low: float, high: float, prior: str = "uniform", name: str | None = None, **_: Any
    ) -> None:
        super().__init__(name, low=low, high=high, prior=prior)


class Integer(Real):
    pass


class Categorical(_Dimension):
    def __init__(self, categories: Sequence[Any], name: str | None = None, **_: Any) -> None:
        super().__init__(name, categories=tuple(categories))


def _wrapped(model: Any = None, models: Any = None, *_: Any, **__: Any) -> Any:
    """MPIModel(model) -> the model itself."""
    return models if model is None else model


def _sourced(comm: Any = None, source: Any = None, *_: Any, **__: Any) -> Any:
    """ModelPytorch(comm, source=model) -> the model itself."""
    return source


KNOWN: dict[str, Any] = {
    **{"MPIModel": _wrapped, "MPITModel": _wrapped, "ModelBuilder": ModelBuilder},
    **{"ModelPytorch": _sourced, "ModelTensorFlow": _sourced},
    **{"Real": Real, "Integer": Integer, "Categorical": Categorical},
}


def builder_of(module: types.ModuleType) -> type | None:
    """The class of a model file that has a `build_model` of its own."""
    return next(
        (
            each
            for each in vars(module).values()
            if inspect.isclass(each)
            and each.__module__ == module.__name__
            and "build_model" in vars(each)
        ),
        None,
    )
