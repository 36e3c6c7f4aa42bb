"""Arguments of what is called from Python: checked by their type hints, with errors in one line."""

from __future__ import annotations

import functools
import inspect
import re
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeAlias, TypeVar, get_type_hints

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from apps.contract import N3LOError
from workflow import toml

P = ParamSpec("P")
R = TypeVar("R")


def trial_number(given: Any) -> Any:
    """The number of a trial that may be given by its name: 3 for "t003".

    Raises:
        ValueError: it is a text, and no name of a trial.
    """
    if not isinstance(given, str):
        return toml.plain(given)
    named = re.fullmatch(r"t?(\d+)", given)
    if named is None:
        raise ValueError('a trial, such as 3 or "t003"')
    return int(named[1])


def _each(given: Any) -> Any:
    """One alone is a list of one."""
    is_one = isinstance(given, str) or not hasattr(given, "__iter__")
    return [given] if is_one else list(given)


def _pair(given: Any) -> Any:
    """
    Raises:
        ValueError: it is not two numbers.
    """
    pair = [] if isinstance(given, str) or not hasattr(given, "__iter__") else list(given)
    pair = [toml.plain(each) for each in pair]
    if len(pair) != 2 or not all(isinstance(each, int | float) for each in pair):
        raise ValueError("a pair of numbers")
    return tuple(pair)


Whole: TypeAlias = Annotated[int, BeforeValidator(toml.plain), Field(ge=0)]
Several: TypeAlias = Annotated[int, BeforeValidator(toml.plain), Field(ge=1)]
Trial: TypeAlias = Annotated[int, BeforeValidator(trial_number), Field(ge=0)]
Trials: TypeAlias = Annotated[Sequence[Trial], BeforeValidator(_each)]
Files: TypeAlias = Annotated[Sequence[str | Path], BeforeValidator(_each)]
Pair: TypeAlias = Annotated[tuple[float, float], BeforeValidator(_pair)]

_WANTED = {
    **{"int_type": "a whole number", "float_type": "a number", "string_type": "a text"},
    **{"dict_type": "a dict", "is_instance_of": "a {class}"},
    **{"greater_than_equal": "at least {ge}", "value_error": "{error}"},
}


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Have the arguments of a function be what its type hints say.

    Raises:
        N3LOError: one is not; a line that names it.
        TypeError: of Python, where one is missing or not known.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:  # Python says it with the function's name
            return function(*args, **kwargs)
        for name, adapter in _adapters(function).items():
            if name in bound.arguments:
                value = bound.arguments[name]
                try:
                    bound.arguments[name] = adapter.validate_python(value, strict=True)
                except ValidationError as error:
                    called = function.__qualname__.removesuffix(".__init__")
                    line = _line(signature, name, error)
                    raise N3LOError(f"{called}: {line}") from None
        return function(*bound.args, **bound.kwargs)

    return call


@functools.cache
def _adapters(function: Callable[..., Any]) -> dict[str, TypeAdapter[Any]]:
    """By argument; not before the first call, when the classes that hints name are there."""
    hints = get_type_hints(function, include_extras=True)
    found = {}
    for name, parameter in inspect.signature(function).parameters.items():
        hint = hints.get(name, Any)
        if parameter.kind is parameter.VAR_POSITIONAL:
            hint = types.GenericAlias(tuple, (hint, ...))
        if hint is not Any and parameter.kind is not parameter.VAR_KEYWORD:
            found[name] = TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))
    return found


def _line(signature: inspect.Signature, name: str, error: ValidationError) -> str:
    """What is wrong, and what the call may be given: a value is often at another's place."""
    errors = error.errors(include_url=False)
    wanted = " or ".join(dict.fromkeys(map(_wanted, errors)))
    known = ", ".join(each for each in signature.parameters if each not in ("self", "cls"))
    return f"{name}: {errors[0]['input']!r} is not {wanted}; its arguments: {known}"


def _wanted(error: ErrorDetails) -> str:
    known = _WANTED.get(error["type"])
    return known.format(**error.get("ctx", {})) if known else error["msg"]
