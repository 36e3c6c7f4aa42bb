"""Constraints of a search space, as text: "model.args.width * model.args.depth <= 2048".

A part of Python's expressions, read through `ast` and never given to `eval`.
"""

from __future__ import annotations

import ast
import math
import operator
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from apps.contract import N3LOError

MAX_LENGTH = 1000  # characters
MAX_DEPTH = 100  # of nesting, or Python's stack could overflow
MAX_EXPONENT = 64  # of whole numbers; above it the power is that of floats, which cannot hang
LARGEST = sys.float_info.max  # of whole numbers too, that they stay small


def _power(base: Any, exponent: Any) -> Any:
    return base**exponent if abs(exponent) <= MAX_EXPONENT else float(base) ** exponent


_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda value, values: value in values,
    ast.NotIn: lambda value, values: value not in values,
}
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "min": min,
    "max": max,
    "log": math.log,
    "log2": math.log2,
    "log10": math.log10,
    "sqrt": math.sqrt,
}
_ALLOWED = (
    "comparisons, and, or, not, + - * / // % **, in [ ], numbers, texts, True, False, and "
    f"{' '.join(_FUNCTIONS)}"
)


@dataclass(frozen=True)
class Expression:
    """What has to be true of a point. Made by `parse`."""

    text: str
    names: tuple[str, ...]  # the dotted paths in it
    _tree: ast.expr = field(repr=False, compare=False)

    @classmethod
    def parse(cls, text: str) -> Expression:
        """
        Raises:
            ValueError: it is not an expression, or has something in it that is not allowed.
        """
        said = _shown(text)
        try:
            tree = _tree(text)
            names = dict.fromkeys(_names(tree))
            if not _is_truth(tree) or _path(tree):
                raise ValueError("is neither true nor false; compare it with something")
        except ValueError as error:
            raise ValueError(f"'{said}' {error}") from None
        return cls(said, tuple(names), tree)

    def holds(self, values: Mapping[str, Any]) -> bool:
        """Whether it is true; false too where it cannot be computed, as 1 / 0 or log(0).

        Args:
            values: those of all its `names`, at least.

        Raises:
            N3LOError: it compares or computes with values of types that do not go together.
        """
        try:
            return _truth(self._tree, values)
        except (ArithmeticError, ValueError):
            return False
        except TypeError as error:
            raise N3LOError(f"search.constraints: '{self.text}': {error}") from None


def _shown(text: str) -> str:
    return " ".join(text.split())


def _tree(text: str) -> ast.expr:
    if len(text) > MAX_LENGTH:
        raise ValueError(f"is longer than {MAX_LENGTH} characters")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python's remarks on odd code
        try:
            return ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise ValueError("is not an expression") from None


def _names(node: ast.expr, depth: int = 0) -> Iterator[str]:
    """The dotted paths in it, in order.

    Raises:
        ValueError: something in it is not allowed.
    """
    if depth > MAX_DEPTH:
        raise ValueError("is nested too deeply")
    path = _path(node)
    if path:
        yield path
        return
    for part in _parts(node):
        yield from _names(part, depth + 1)


def _parts(node: ast.expr) -> list[ast.expr]:
    """What it is made of, if it is allowed."""
    match node:
        case ast.Constant(value=bool() | str()):
            return []
        case ast.Constant(value=int() | float() as value) if abs(value) <= LARGEST:
            return []
        case ast.BoolOp(values=parts) if all(map(_is_truth, parts)):
            return parts
        case ast.UnaryOp(op=ast.Not(), operand=part) if _is_truth(part):
            return [part]
        case ast.UnaryOp(op=ast.USub(), operand=part):
            return [part]
        case ast.BinOp(op=op, left=left, right=right) if type(op) in _ARITHMETIC:
            return [left, right]
        case ast.Compare(left=left, ops=ops, comparators=others):
            pairs = zip(ops, others, strict=True)
            return [left, *(part for op, other in pairs for part in _compared(op, other, node))]
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
            return _arguments(name, arguments, node)
    raise _not_allowed(node)


def _compared(op: ast.cmpop, other: ast.expr, node: ast.expr) -> list[ast.expr]:
    if type(op) not in _COMPARE:
        raise _not_allowed(node)
    if not isinstance(op, ast.In | ast.NotIn):
        return [other]
    if isinstance(other, ast.List | ast.Tuple) and all(map(_is_constant, other.elts)):
        return other.elts
    raise ValueError("has an 'in' without a list of values, as in [1, 2]")


def _arguments(name: str, arguments: list[ast.expr], node: ast.expr) -> list[ast.expr]:
    if name not in _FUNCTIONS:
        raise _not_allowed(node)
    is_many = name in ("min", "max")
    if len(arguments) < 2 if is_many else len(arguments) != 1:
        raise ValueError(f"has {name} without {'two values or more' if is_many else 'one value'}")
    return arguments


def _is_truth(node: ast.expr) -> bool:
    """Whether it is true or false, as far as one can see; a name may be."""
    match node:
        case ast.Compare() | ast.BoolOp() | ast.UnaryOp(op=ast.Not()):
            return True
        case ast.Constant(value=bool()):
            return True
    return bool(_path(node))


def _is_constant(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        node = node.operand
    return isinstance(node, ast.Constant)


def _path(node: ast.expr) -> str:
    """ "model.args.width" of the names and dots that stand for it; "" of anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        above = _path(node.value)
        return f"{above}.{node.attr}" if above else ""
    return ""


def _not_allowed(node: ast.expr) -> ValueError:
    return ValueError(f"has '{_shown(ast.unparse(node))}' in it; allowed are {_ALLOWED}")


def _truth(node: ast.expr, values: Mapping[str, Any]) -> bool:
    value = _value(node, values)
    if not isinstance(value, bool):
        raise TypeError(f"{_path(node)} is {value!r}, which is neither true nor false")
    return value


def _value(node: ast.expr, values: Mapping[str, Any]) -> Any:
    match node:
        case ast.Name() | ast.Attribute():
            return values[_path(node)]
        case ast.Constant(value=value):
            return value
        case ast.BoolOp(op=ast.And(), values=parts):
            return all(_truth(part, values) for part in parts)
        case ast.BoolOp(values=parts):
            return any(_truth(part, values) for part in parts)
        case ast.UnaryOp(op=ast.Not(), operand=part):
            return not _truth(part, values)
        case ast.UnaryOp(operand=part):
            return -_number(_value(part, values))
        case ast.BinOp(left=left, op=operation, right=right):
            return _computed(_ARITHMETIC[type(operation)], [left, right], values)
        case ast.Call(func=ast.Name(id=name), args=arguments):
            return _computed(_FUNCTIONS[name], arguments, values)
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return [_value(part, values) for part in parts]
        case ast.Compare(left=left, ops=ops, comparators=others):
            value = _value(left, values)
            for op, other in zip(ops, others, strict=True):
                before, value = value, _value(other, values)
                if not _COMPARE[type(op)](before, value):
                    return False
            return True
    raise AssertionError(node)  # `_parts` lets nothing else through


def _computed(
    function: Callable[..., Any], arguments: list[ast.expr], values: Mapping[str, Any]
) -> Any:
    return _small(function(*(_number(_value(each, values)) for each in arguments)))


def _number(value: Any) -> Any:
    """Texts could be added and multiplied too, to any length."""
    if isinstance(value, str):
        raise TypeError(f"{value!r} is no number to compute with")
    return value


def _small(result: Any) -> Any:
    """Python's floats become inf quietly, and its whole numbers grow until the memory ends."""
    if isinstance(result, complex) or not abs(result) <= LARGEST:
        raise OverflowError
    return result
