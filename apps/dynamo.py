"""torch._dynamo, imported when something needs it, and not because an optimizer is there.

Every optimizer of torch calls two of its functions, `disable` and `graph_break`, which tell a
compiler where to stop. For them alone 800 modules would be imported, in the time that `import
torch` takes itself: 1.5 s of every rank. Where nothing compiles, the first gives back the function
that it is given, and the second does nothing, in torch's own version too.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

NAME = "torch._dynamo"


def defer() -> None:
    """From now on it is imported when anything but those two functions of it is asked for."""
    if NAME not in sys.modules:
        stand_in = _StandIn(importlib.util.find_spec(NAME))
        sys.modules[NAME] = stand_in
        torch._dynamo = stand_in
        sys.meta_path.insert(0, _Submodules())


class _StandIn(ModuleType):
    """In its place, until then."""

    def __init__(self, spec: ModuleSpec) -> None:
        super().__init__(spec.name)
        self.__spec__, self.__loader__, self.__file__ = spec, spec.loader, spec.origin
        self.__path__ = spec.submodule_search_locations
        self.functions: list[Callable[..., Any]] = []

    def disable(
        self, fn: Any = None, recursive: bool = True, *, reason: Any = None, wrapping: bool = True
    ) -> Any:
        if wrapping:  # a wish of somebody else than torch, who does not come again
            return _import().disable(fn, recursive, reason=reason)
        self.functions.append(fn)
        return fn

    def graph_break(self, msg: str = "") -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # whoever looks through all modules does not use this one
            raise AttributeError(name)
        return getattr(_import(), name)


class _Submodules:
    """Has torch._dynamo imported before a module in it, which it imports itself."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not name.startswith(f"{NAME}."):
            return None
        _import()
        module = sys.modules.get(name)
        if module is None:
            return None
        spec = module.__spec__
        vars(module)["__spec__"] = None  # or importlib would follow it, and load the module again
        return importlib.util.spec_from_loader(name, _There(module, spec))


class _There:
    """Loads what is loaded."""

    def __init__(self, module: ModuleType, spec: ModuleSpec | None) -> None:
        self.module, self.spec = module, spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__spec__"] = self.spec


def _import() -> ModuleType:
    """The real one, in the place of the stand-in."""
    stand_in = sys.modules[NAME]
    if isinstance(stand_in, _StandIn):
        sys.meta_path[:] = [each for each in sys.meta_path if not isinstance(each, _Submodules)]
        del sys.modules[NAME], torch._dynamo
        for function in stand_in.functions:  # torch remembers what came of it, and asks anew
            vars(function).pop("__dynamo_disable", None)
    return importlib.import_module(NAME)
