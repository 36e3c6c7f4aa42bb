"""What a study names by "file.py:Name" or "package.module:Name", and arguments that it gives."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from apps import frameworks
from apps.contract import N3LOError, package_of
from apps.frameworks import vision

T = TypeVar("T")


def imported(place: str, shown: str) -> Any:
    """The module at the path of a file, or of that name; `shown` names it in an error.

    Raises:
        N3LOError: it cannot be imported.
    """
    vision.watch()
    try:
        return _import_file(place) if place.endswith(".py") else importlib.import_module(place)
    except (Exception, SystemExit) as error:  # a user's file can raise anything
        raise N3LOError(f"{shown}: {frameworks.remedy(error) or describe(error, place)}") from error


def load_object(where: str, source: str) -> Any:
    """Import what "package.module:Name" or "file.py:Name" names.

    Args:
        where: the key of the study that names it.

    Raises:
        N3LOError: it cannot be imported, or is not there.
    """
    place, _, name = source.partition(":")
    shown = shown_source(where, source)
    module = imported(place, shown)
    if not hasattr(module, name):
        raise N3LOError(f"{shown}: there is no '{name}', only {_offered(module, name)}")
    return getattr(module, name)


MOST_OFFERED = 12  # names in a message


def _offered(module: Any, name: str) -> str:
    """The classes and functions of a module or a package; of many those that are like a name."""
    there = [
        key
        for key, value in vars(module).items()
        if (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__.startswith(module.__name__)
        and not key.startswith("_")
    ]
    if len(there) > MOST_OFFERED:
        alike = difflib.get_close_matches(name, there, 5)
        return f"{len(there)} others" + (f", such as {', '.join(alike)}" if alike else "")
    return ", ".join(there) or "no class or function"


def shown_source(where: str, source: str) -> str:
    """As messages name it, without the folder: "data.collate 'graphs.py:fully_connected'"."""
    return f"{where} '{source.rpartition('/')[2]}'"


def source_file(source: str) -> str | None:
    """The file of "package.module:Name" or "file.py:Name", once it is imported."""
    place = source.partition(":")[0]
    return place if place.endswith(".py") else getattr(sys.modules.get(place), "__file__", None)


def describe(error: BaseException, file: str | None = None) -> str:
    """One line: what was raised, and the deepest line of `file`, or else of all, that led there."""
    if isinstance(error, SyntaxError) and error.filename:
        text, place = error.msg, f"{Path(error.filename).name} line {error.lineno}"
    else:
        text, place = " ".join(str(error).split()), place_of(error, file)
    return f"{type(error).__name__}: {text[:500]} ({place}){hint(error)}"


def place_of(error: BaseException, file: str | None = None) -> str:
    """The deepest line of `file`, or else of all, that led to an error."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = ([each for each in frames if each.filename == file] or frames)[-1]
    return f"{Path(frame.filename).name} line {frame.lineno}"


LEAVE_THE_DEVICE = (
    "leave the device to N3LO, which moves model and data: take out .cuda(), .to('cuda') and "
    "device = 'cuda', make new tensors in forward with device=x.device, and keep others by "
    "register_buffer"
)

# What torch and Python say of mistakes that are made in a model's file, and the way out.
HINTS = {
    (
        *("torch not compiled with cuda", "found no nvidia driver", "no cuda gpus are available"),
        *("expected all tensors to be on the same device", "deserialize object on a cuda device"),
    ): LEAVE_THE_DEVICE,
    ("must have the same shape up until the last dimension: target.shape=",): (
        "for one-hot targets compile with categorical_crossentropy, or make them class numbers: "
        'data.transforms = { NAME = ["class_number"] }'
    ),
    ("arguments `target` and `output` must have the same shape. received: target.shape=",): (
        "class numbers are for sparse_categorical_crossentropy; other losses of Keras compare "
        "targets with outputs of their shape"
    ),
    ("operator torchvision::",): (
        "torchvision is made for another torch: install both from the same index"
    ),
}


# What libraries raise that find no network where they would download weights.
NO_NETWORK = ("URLError", "LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectError")


def _raised(error: BaseException) -> Iterator[type]:
    """The classes of an error, and of those that led to it."""
    each: BaseException | None = error
    while each is not None:
        yield from type(each).__mro__
        each = each.__cause__ or each.__context__


def hint(error: BaseException) -> str:
    """How to mend what was raised, if that is known, to be put behind what `describe` says."""
    text = str(error).lower()
    for texts, way_out in HINTS.items():
        if any(each in text for each in texts):
            return f"; {way_out}"
    if isinstance(error, SystemExit):
        return (
            "; the model's code must not end the program, nor read its command line (argparse, "
            "sys.argv): what varies are arguments, which model.args gives"
        )
    if any(each.__name__ in NO_NETWORK for each in _raised(error)):
        return (
            "; it wants to download something, such as weights, and there is no network: make the "
            "model once on a host that has one and the same home folder (torchvision keeps them in "
            "TORCH_HOME, timm in HF_HOME), or load a file in the constructor"
        )
    if isinstance(error, ModuleNotFoundError) and error.name:
        name = error.name.partition(".")[0]
        return (
            f"; if {name} is a library, install it in {sys.prefix}; if it is a file of yours, put "
            f"{name}.py beside the file that imports it"
        )
    return ""


def odd_arguments(signature: inspect.Signature, arguments: Mapping[str, Any], key: str) -> str:
    """Which arguments are of another type than their defaults, behind what `describe` says."""
    found = []
    for name, value in arguments.items():
        parameter = signature.parameters.get(name)
        default = parameter.default if parameter else None
        kind = type(default) if dataclasses.is_dataclass(default) else _annotation(parameter)
        if isinstance(value, dict) and dataclasses.is_dataclass(kind):
            found.append(
                f"; {key}.{name} is given as a dict, and it is a {kind.__name__}: make that of it "
                f"first, {name} = {kind.__name__}(**{name})"
            )
            continue
        numbers = type(value) is int and type(default) is float
        if default is not None and default is not inspect.Parameter.empty and not numbers:
            kinds = type(value).__name__, type(default).__name__
            if kinds[0] != kinds[1] and not isinstance(default, list | tuple | type):
                found.append(
                    f"; {key}.{name} = {value!r} is of type {kinds[0]}, and the default, "
                    f"{default!r}, is of type {kinds[1]}"
                )
    return "".join(found)


def _annotation(parameter: inspect.Parameter | None) -> Any:
    return parameter.annotation if parameter else None


def _import_file(path: str) -> Any:
    """Import a file by its path; files beside it can be imported by it, as in a script.

    A study may name several things of one file: it is imported once, so that classes are the same.
    A file of a package is imported as its module, so that it can import by `from .other import`.
    """
    folder = Path(path).parent
    content = Path(path).read_bytes()
    known, module = _FILES.get(path, (None, None))
    if known == content:
        return module
    root, name = package_of(Path(path))
    for each in (str(root), str(folder)):  # a file's own folder first, as in a script
        if each not in sys.path:
            sys.path.insert(0, each)
    if module is not None:
        sys.modules.pop(module.__name__, None)
    if root != folder and _is_found(name, path):
        module = importlib.import_module(name)
    else:
        spec = importlib.util.spec_from_file_location(f"n3lo_model_{Path(path).stem}", path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[module.__name__] = module  # dataclasses in it look themselves up there
        spec.loader.exec_module(module)
    _FILES[path] = content, module
    return module


def _is_found(name: str, path: str) -> bool:
    """Whether the module of this name is that file, and no other package has the name."""
    spec = importlib.util.find_spec(name.partition(".")[0])
    inside = name.split(".")[1:]
    places = spec.submodule_search_locations if spec else None
    found = [Path(place, *inside) for place in places or ()]
    return any(Path(path) in (each.with_suffix(".py"), each / "__init__.py") for each in found)


_FILES: dict[str, tuple[bytes, Any]] = {}  # that were imported: what they held, and the module


def choose(where: str, name: str, choices: Mapping[str, T]) -> T:
    if name not in choices:
        raise N3LOError(f"{where}: there is no '{name}', only {', '.join(sorted(choices))}")
    return choices[name]


def signature_of(made: Any, what: str) -> inspect.Signature:
    """
    Raises:
        N3LOError: it cannot be called, or does not tell what it takes, as functions in C do not.
    """
    try:
        return inspect.signature(made)
    except (TypeError, ValueError) as error:
        raise N3LOError(
            f"{what}: is a {type(made).__name__} whose arguments are not known; call it in a "
            "function or a class of your own"
        ) from error


def check_arguments(
    signature: inspect.Signature, arguments: dict[str, Any], what: str, own: tuple[str, ...] = ()
) -> None:
    """Compare with the signature first: a TypeError from within would mean something else.

    Args:
        own: arguments that do not come from the user.
    """
    try:
        signature.bind(**arguments)
    except TypeError as error:
        accepted = [name for name in signature.parameters if name not in own]
        raise N3LOError(f"{what}: {error}; it takes {', '.join(accepted) or 'none'}") from error
