"""Look into a model file that was written for NNLO, and say what a study needs to know of it.

    python -P -m apps.nnlo_import request.json report.json

The request names the file, and the lists of data where the user gave them. Exit status 2 and
{"error": ...} if the user has to mend something.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import h5py
import numpy as np
import torch
from torch import nn

from apps import frameworks
from apps.contract import N3LOError, read_json, write_json
from apps.experiment import describe
from apps.models import nnlo

Adaptor = Callable[[np.ndarray], Any]

TRIED = 4  # events whose numbers are all different, on which it is seen what an adaptor takes
GUESSED = ((7, 5), (20,), (6, 5, 4))  # shapes of an event, where there is no file to look into
# What an adaptor may treat in a way of its own: of whole numbers, and of others.
WHOLE = (0, 1, -1, 2, -3, 100, -300, 70_000, -(2**20))
OTHERS = (0.5, -0.25, 1e-3, -1e-5, 1e-8, 2.7, -99.6, 1e30, -1e30, np.nan, np.inf, -np.inf)
PROBED = 2**20  # such numbers
LOOKED_AT = 2**26  # bytes of the first file


def main() -> None:
    request, report = read_json(Path(sys.argv[1])), Path(sys.argv[2])
    frameworks.choose_backend()
    try:
        write_json(report, look(**request))
    except N3LOError as error:
        write_json(report, {"error": str(error)})
        sys.exit(2)


def look(file: str, lists: Mapping[str, str | None], names: Mapping[str, str]) -> dict[str, Any]:
    """What a model file says, and what its model needs.

    Args:
        file: its path.
        lists: "train" and "val" -> a text file that names a data file in each line; None = the
            model file knows.
        names: "features" and "labels" -> the dataset, where the model file does not say.

    Raises:
        N3LOError: it cannot be imported, or lacks something.
    """
    path = Path(file).resolve()
    module, missing = _imported(path)
    files = {role: _data_files(module, path, role, given) for role, given in lists.items()}
    first = next((each for each in files["train"] if Path(each).is_file()), None)
    fields = {role: _adapted_field(module, role, name, first) for role, name in names.items()}
    get_model = _get_model(module, path)
    parameters = _parameters(get_model, path)
    args = {each["name"]: _base_value(get_model, each) for each in parameters}
    with nnlo.stand_ins(), nnlo.on_the_host() as calls:
        model = _made(get_model, args, path)
    is_keras = any(each.__module__.startswith("keras.") for each in type(model).__mro__)
    plain_tensors = [] if is_keras else nnlo.plain_tensors(model)
    packages = dict.fromkeys(each.partition(".")[0] for each in missing)
    model_needs = [
        *(f"it imports {package}" for package in packages),
        *(["its constructor calls .cuda()"] if calls else []),
        *(["it keeps tensors that are no buffers"] if plain_tensors else []),
        *(["NNLO compiled it, with --loss"] if is_keras else []),
    ]
    return {
        "name": _said(module, "get_name", path),
        "builder": None if hasattr(module, "get_model") else get_model.__name__,
        "is_keras": is_keras,
        "parameters": parameters,
        "args": args,
        **files,
        "events": {each: _num_events(each, fields["features"]["name"]) for each in _there(files)},
        **fields,
        "needs": model_needs,
        "gives_probabilities": _gives_probabilities(model, module, names, first),
        "num_gpus": torch.cuda.device_count(),
    }


# -- the model file --------------------------------------------------------------------------------


def _imported(path: Path) -> tuple[ModuleType, list[str]]:
    """The module of a file, and NNLO's modules that it asked for in vain."""
    if not path.is_file():
        raise N3LOError(f"there is no model file '{path}'")
    sys.path.insert(0, str(path.parent))
    try:
        with nnlo.stand_ins() as missing, warnings.catch_warnings(action="ignore"):
            return importlib.import_module(path.stem), missing
    except (Exception, SystemExit) as error:  # a user's file can raise anything
        raise N3LOError(f"{path}: {_told(error, path)}") from error


def _get_model(module: ModuleType, path: Path) -> Callable[..., Any]:
    if hasattr(module, "get_model"):
        return module.get_model
    builder = nnlo.builder_of(module)
    if builder is None:
        raise N3LOError(
            f"{path}: there is neither a function get_model nor a class with build_model; NNLO's "
            "model files have get_model(**parameters), which returns the model"
        )
    get_model = nnlo.built_by(builder)
    get_model.__name__ = builder.__name__
    return get_model


def _made(get_model: Callable[..., Any], args: dict[str, Any], path: Path) -> nn.Module:
    try:
        model = get_model(**args)
    except (Exception, SystemExit) as error:
        shown = ", ".join(f"{name}={value!r}" for name, value in args.items())
        raise N3LOError(f"{path}: get_model({shown}): {_told(error, path)}") from error
    if isinstance(model, list | tuple | nnlo.Nothing):
        raise N3LOError(
            f"{path}: get_model gives several models that train together, or a class of NNLO's own "
            "such as GANModel; for a GAN start from studies/calorimeter_gan.toml, and see "
            "docs/coming_from_nnlo.md"
        )
    if not isinstance(model, nn.Module):
        raise N3LOError(
            f"{path}: get_model gives a {type(model).__name__}, not a torch.nn.Module or a model "
            "of Keras 3"
        )
    return model


def _said(module: ModuleType, function: str, path: Path) -> Any:
    """What a function of the file without arguments returns; None if there is none."""
    if not hasattr(module, function):
        return None
    try:
        return getattr(module, function)()
    except (Exception, SystemExit) as error:
        raise N3LOError(f"{path}: {function}(): {_told(error, path)}") from error


def _told(error: BaseException, path: Path) -> str:
    if isinstance(error, SystemExit):
        return f"it calls sys.exit({error.code!r}); move that below if __name__ == '__main__'"
    return describe(error, str(path))


def _parameters(get_model: Callable[..., Any], path: Path) -> list[dict[str, Any]]:
    """The dimensions of get_model.parameter_range, as a study has them, with their names."""
    found = [_dimension(each, path) for each in getattr(get_model, "parameter_range", [])]
    taken = inspect.signature(get_model).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in taken.values())
    unknown = [each["name"] for each in found if each["name"] not in taken and not takes_all]
    if unknown:
        raise N3LOError(
            f"{path}: parameter_range: '{unknown[0]}' is no argument of get_model, which takes "
            f"{', '.join(taken) or 'none'}"
        )
    return found


def _dimension(each: Any, path: Path) -> dict[str, Any]:
    name = getattr(each, "name", None)
    if not name:
        raise N3LOError(f"{path}: parameter_range: {each!r} has no name; write name='...'")
    if hasattr(each, "categories"):
        values = [_plain(value) for value in each.categories]
        if not all(isinstance(value, bool | int | float | str) for value in values):
            raise N3LOError(
                f"{path}: parameter_range: '{name}' has values that are neither numbers nor texts; "
                "give them names, and let get_model look them up"
            )
        return {"name": name, "type": "choice", "values": values}
    kind, number = ("int", int) if type(each).__name__ == "Integer" else ("real", float)
    log = {"log": True} if each.prior == "log-uniform" else {}
    return {"name": name, "type": kind, "low": number(each.low), "high": number(each.high), **log}


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _base_value(get_model: Callable[..., Any], dimension: Mapping[str, Any]) -> Any:
    """What a trial has that does not search it: get_model's own default, or the middle."""
    argument = inspect.signature(get_model).parameters.get(dimension["name"])
    own = None if argument is None else argument.default
    if dimension["type"] == "choice":
        return own if own in dimension["values"] else dimension["values"][0]
    low, high = dimension["low"], dimension["high"]
    if isinstance(own, int | float) and low <= own <= high:
        return type(low)(own)
    middle = (low * high) ** 0.5 if dimension.get("log") else (low + high) / 2
    return int(middle) if dimension["type"] == "int" else float(f"{middle:.6g}")


# -- the data --------------------------------------------------------------------------------------


def _data_files(module: ModuleType, path: Path, role: str, given: str | None) -> list[str]:
    """From a list in a text file, or from get_train() or get_val()."""
    said = given if given is not None else _said(module, f"get_{role}", path)
    if said is None and role == "train":
        said = _said(module, "get_all", path)
    if isinstance(said, str):
        said = [said] if said.endswith((".h5", ".hdf5")) else _lines(Path(said))
    listed = next((each for each in said or [] if str(each).endswith((".list", ".txt"))), None)
    if given is None and listed is not None:
        raise N3LOError(
            f"{path}: get_{role}() gives a list with '{listed}' in it, which is no data file: "
            "return that name alone, and the files are read from it"
        )
    files = [str(Path(each).expanduser().absolute()) for each in said or []]
    if not files and role == "train":
        raise N3LOError(
            f"{path}: get_train() names no file on this host; name them in a text file, one a "
            "line: --train_data train.txt --val_data val.txt"
        )
    return list(dict.fromkeys(files))


def _lines(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise N3LOError(
            f"the list of data files '{path}' cannot be read: {_reason(error)}"
        ) from error
    return [line.strip() for line in text.splitlines() if line.strip()]


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)


def _there(files: Mapping[str, Sequence[str]]) -> list[str]:
    named = dict.fromkeys(itertools.chain(*files.values()))
    return [each for each in named if Path(each).is_file()]


def _num_events(file: str, name: str) -> int | None:
    with _opened(file) as opened:
        found = opened.get(name)
        if isinstance(found, h5py.Group):
            found = next((each for each in found.values() if isinstance(each, h5py.Dataset)), None)
        return None if found is None else len(found)


def _opened(file: str) -> h5py.File:
    try:
        return h5py.File(file, "r", locking=False)
    except OSError as error:
        raise N3LOError(f"'{file}' is not a readable HDF5 file: {error}") from error


def _name_and_adaptor(module: ModuleType, role: str, name: str) -> tuple[str, Adaptor | None]:
    """Of get_features() or get_labels(): a name, or (name, function)."""
    said = getattr(module, f"get_{role}", lambda: name)()
    return said if isinstance(said, tuple) else (said, None)


def _adapted_field(module: ModuleType, role: str, name: str, file: str | None) -> dict[str, Any]:
    """The field of a study, and the steps that do what an adaptor did.

    Returns:
        name: of the dataset; field: as the study names it; steps: of data.transforms; known:
        whether these do what the adaptor does; alone: where not, whether it treats each event for
        itself.
    """
    dataset, adaptor = _name_and_adaptor(module, role, name)
    facts = {"name": dataset, "field": dataset, "steps": [], "known": True}
    if adaptor is None:
        return facts
    real = _first_events(file, dataset)
    for shape in GUESSED if real is None else (real.shape[1:],):
        for found in recognised(adaptor, shape, real):
            return {**facts, **found, "field": dataset + found.get("field", "")}
    return {**facts, "known": False, "alone": _takes_each_alone(adaptor, real)}


def _first_events(file: str | None, dataset: str) -> np.ndarray | None:
    """As many as `LOOKED_AT` allows, (N, ...); None if they cannot be seen."""
    if file is None:
        return None
    with _opened(file) as opened:
        found = opened.get(dataset)
        if not isinstance(found, h5py.Dataset) or not found.shape or found.dtype.kind not in "fiub":
            return None
        if not len(found):
            return None
        size = math.prod(found.shape[1:]) * found.dtype.itemsize
        return found[: max(TRIED, LOOKED_AT // max(1, size))]


# -- what an adaptor does --------------------------------------------------------------------------


def recognised(
    adaptor: Adaptor, shape: tuple[int, ...], real: np.ndarray | None = None
) -> Iterator[dict[str, Any]]:
    """A field's index, or steps of data.transforms, that give what the adaptor gives.

    Args:
        adaptor: a function of the events of a file, (N, ...).
        shape: of one event.
        real: events of a file, (N, *shape); None = there is none.
    """
    samples = [_all_different(shape), _probe(shape, real), *([] if real is None else [real])]
    made = [_tried(adaptor, events) for events in samples]
    if any(each is None for each in made):
        return
    for found, same in _candidates(adaptor, shape):
        if all(_equal(each, same(events)) for events, each in zip(samples, made, strict=True)):
            yield found


def _candidates(
    adaptor: Adaptor, shape: tuple[int, ...]
) -> Iterator[tuple[dict[str, Any], Adaptor]]:
    """What a study can say, and what it does to events."""
    ndim = len(shape) + 1
    yield {}, lambda events: events
    for axes in itertools.permutations(range(1, ndim)):
        transpose = {"name": "transpose", "axes": list(axes)}
        yield {"steps": [transpose]}, partial(np.transpose, axes=(0, *axes))
    for at in (1, ndim):
        channel_axis = {"name": "channel_axis", "at": "first" if at == 1 else "last"}
        yield {"steps": [channel_axis]}, partial(np.expand_dims, axis=at)
    yield {"steps": ["flatten"]}, lambda events: events.reshape(len(events), -1)
    if ndim == 2:
        yield {"steps": ["class_number"]}, partial(np.argmax, axis=1)
    for axis in range(1, ndim):
        index = _index(adaptor, shape, axis)
        if index is not None:
            shown = ", ".join([":"] * axis + [_shown(index)])
            yield {"field": f"[{shown}]"}, itemgetter((slice(None),) * axis + (index,))
    by = _factor(adaptor, shape)
    if by is not None:
        yield {"steps": [{"name": "scale", "by": by}]}, lambda events: by * events


def _factor(adaptor: Adaptor, shape: tuple[int, ...]) -> float | None:
    events = _all_different(shape)
    made = _tried(adaptor, events)
    if made is None or made.shape != events.shape or not events.size:
        return None
    by = float(f"{made.flat[-1] / events.flat[-1]:.9g}")
    return None if by in (0.0, 1.0) else by


def _all_different(shape: tuple[int, ...]) -> np.ndarray:
    """Events of whole numbers above 0, (TRIED, *shape)."""
    size = TRIED * math.prod(shape)
    return np.random.default_rng(1).permutation(np.arange(1.0, size + 1)).reshape(TRIED, *shape)


def _probe(shape: tuple[int, ...], real: np.ndarray | None) -> np.ndarray:
    """Events of numbers that an adaptor may treat in a way of its own, (N, *shape).

    Where the data are whole numbers, such as classes and pixels, it is tried on these alone.
    """
    values = np.array([*WHOLE, *OTHERS])
    if real is not None and (real.dtype.kind == "b" or np.array_equal(real, np.trunc(real))):
        values = np.array(WHOLE)
        if real.dtype.kind in "iu":
            limits = np.iinfo(real.dtype)
            values = values[(values >= limits.min) & (values <= limits.max)]
        values = values.astype(real.dtype)
    num_events = max(TRIED, PROBED // max(1, math.prod(shape)))
    return np.random.default_rng(2).choice(values, size=(num_events, *shape))


def _tried(adaptor: Adaptor, events: np.ndarray) -> np.ndarray | None:
    """What becomes of events; None if these are not what it is made for, or become several."""
    made = _parts(adaptor, events)
    return made[0] if made is not None and len(made) == 1 else None


def _equal(made: np.ndarray, expected: np.ndarray, rtol: float = 1e-6) -> bool:
    return made.shape == expected.shape and np.allclose(
        made, expected, rtol=rtol, atol=0, equal_nan=True
    )


def _takes_each_alone(adaptor: Adaptor, real: np.ndarray | None) -> bool:
    """Whether the events of a batch become what they become in their file.

    True where that cannot be seen: `plan` calls it too.
    """
    shapes = GUESSED if real is None else (real.shape[1:],)
    samples = [make(shape) for shape in shapes for make in (_all_different, _many_different)]
    for events in [*samples, *([] if real is None else [real])]:
        halves = events[: len(events) // 2], events[len(events) // 2 :]
        together, first, rest = (_parts(adaptor, each) for each in (events, *halves))
        if together is None or first is None or rest is None:
            continue
        for whole, *parts in zip(together, first, rest, strict=False):
            if len({part.shape[1:] for part in parts}) > 1:
                return False
            if not _equal(whole, np.concatenate(parts), rtol=1e-4):
                return False
    return True


def _many_different(shape: tuple[int, ...]) -> np.ndarray:
    num_events = max(TRIED, PROBED // max(1, math.prod(shape)))
    return np.random.default_rng(3).normal(size=(num_events, *shape))


def _parts(adaptor: Adaptor, events: np.ndarray) -> list[np.ndarray] | None:
    """What becomes of events: one array, or one for each input of a model."""
    try:
        with warnings.catch_warnings(action="ignore"):
            made = adaptor(events.copy())
    except Exception:  # noqa: BLE001  made for another shape
        return None
    parts = [np.asarray(each) for each in (made if isinstance(made, list | tuple) else [made])]
    return parts if all(each.dtype.kind in "fiub" and each.ndim for each in parts) else None


def _index(adaptor: Adaptor, shape: tuple[int, ...], axis: int) -> int | slice | None:
    """slice(-6, -1), if the adaptor takes these along an axis; 3, if it takes that one alone.

    Whether a place is counted from the end is seen where the axis is one longer.
    """
    longer = tuple(size + (number == axis) for number, size in enumerate(shape, start=1))
    short, long = _taken(adaptor, shape, axis), _taken(adaptor, longer, axis)
    if short is None or long is None or short[2] != long[2]:
        return None
    size = shape[axis - 1]
    ends = []
    for here, there in zip(short[:2], long[:2], strict=True):
        if there - here not in (0, 1):
            return None
        ends.append(here if there == here else here - size)
    first, last = ends
    return first if short[2] else slice(first or None, last or None)


def _shown(index: int | slice) -> str:
    """As it is written between brackets."""
    if isinstance(index, int):
        return str(index)
    return f"{index.start or ''}:{index.stop or ''}"


def _taken(adaptor: Adaptor, shape: tuple[int, ...], axis: int) -> tuple[int, int, bool] | None:
    """First place that is taken along an axis, the one after the last, and whether it is alone."""
    events = _all_different(shape)
    made = _tried(adaptor, events)
    if made is None or made.size == 0:
        return None
    first = int(np.argwhere(events == made.flat[0])[0][axis]) if made.flat[0] in events else -1
    if first < 0:
        return None
    if made.ndim == events.ndim - 1:
        is_so = np.array_equal(made, events.take(first, axis=axis))
        return (first, first + 1, True) if is_so else None
    if made.ndim != events.ndim:
        return None
    last = first + made.shape[axis]
    is_so = last <= shape[axis - 1] and np.array_equal(
        made, events.take(range(first, last), axis=axis)
    )
    return (first, last, False) if is_so else None


# -- what the model gives --------------------------------------------------------------------------


def _gives_probabilities(
    model: nn.Module, module: ModuleType, names: Mapping[str, str], file: str | None
) -> bool:
    """Whether its outputs are those of a softmax; False if that cannot be seen."""
    if file is None:
        return False
    name, adaptor = _name_and_adaptor(module, "features", names["features"])
    try:
        with h5py.File(file, "r", locking=False) as opened:
            events = opened[name][:TRIED]
        inputs = np.ascontiguousarray(events if adaptor is None else adaptor(events))
        with torch.no_grad():
            outputs = model.eval()(torch.from_numpy(inputs).float())
        return bool(
            outputs.ndim == 2
            and outputs.shape[1] > 1
            and (outputs >= 0).all()
            and torch.allclose(outputs.sum(dim=1), torch.ones(len(outputs)), atol=1e-4)
        )
    except Exception:  # noqa: BLE001  `plan` says what is wrong with model and data
        return False


if __name__ == "__main__":
    main()
