"""What a constraint may say, when it holds, and the one line that each mistake gets."""

from __future__ import annotations

import math

import numpy as np
import pytest

from apps.contract import N3LOError
from workflow.expression import Expression

VALUES = {
    "model.args.width": 64,
    "model.args.depth": 3,
    "model.args.kind": "cnn",
    "data.shuffle": True,
    "training.optimizer.lr": 1e-3,
}
ALLOWED = (
    "allowed are comparisons, and, or, not, + - * / // % **, in [ ], numbers, texts, True, False, "
    "and abs min max log log2 log10 sqrt"
)


def holds(text: str, **values: object) -> bool:
    return Expression.parse(text).holds({**VALUES, **values})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model.args.width * model.args.depth <= 192", True),
        ("model.args.width * model.args.depth < 192", False),
        ("model.args.width > 64 or model.args.kind == 'cnn'", True),
        ("model.args.width > 64 and model.args.kind == 'cnn'", False),
        ("not model.args.width > 64", True),
        ("1 < model.args.depth <= 3", True),
        ("3 < model.args.depth <= 4", False),
        ("model.args.depth != 3", False),
        ("model.args.kind in ['cnn', 'graph']", True),
        ("model.args.depth in (-3, 2)", False),
        ("model.args.depth not in (1, 2)", True),
        ("data.shuffle and model.args.depth == 3", True),
        ("not data.shuffle or model.args.depth == 2", False),
        ("data.shuffle == False", False),
        ("model.args.width // 10 + model.args.width % 10 == 10", True),
        ("model.args.width / 128 == 0.5", True),
        ("2 ** model.args.depth - 9 == -1", True),
        ("log2(model.args.width) == 6", True),
        ("log10(training.optimizer.lr) >= -3.0000001", True),
        ("sqrt(model.args.width) == 8", True),
        ("abs(-model.args.depth) == max(1, 2, 3) == 3 * min(5, 1)", True),
        ("(\n  model.args.width\n  >= 64\n)", True),
        ("True", True),
        ("not True", False),
    ],
)
def test_it_means_what_it_means_in_python(text: str, expected: bool) -> None:
    assert holds(text) is expected


def test_random_arithmetic_is_that_of_numpy() -> None:
    rng = np.random.default_rng(0)
    expression = Expression.parse("log(a) * sqrt(b) - a / b + a ** 0.5 <= c and a % b < b")
    truths = set()
    for _ in range(500):
        a, b, c = rng.uniform(0.1, 9, size=3).tolist()
        expected = np.log(a) * np.sqrt(b) - a / b + a**0.5 <= c and a % b < b
        assert expression.holds({"a": a, "b": b, "c": c}) is bool(expected)
        truths.add(bool(expected))
    assert truths == {True, False}


def test_its_names_are_the_dotted_paths_each_once_in_order() -> None:
    text = "model.args.width * n <= max(model.args.width, 2) and log(a.b) in [1, -2]"
    assert Expression.parse(text).names == ("model.args.width", "n", "a.b")
    assert Expression.parse("1 < 2").names == ()


def test_equal_texts_are_equal_expressions() -> None:
    assert Expression.parse("a  < 1") == Expression.parse(" a < 1")
    assert Expression.parse("a < 1") != Expression.parse("a < 2")
    assert len({Expression.parse("a < 1"), Expression.parse("a < 1")}) == 1


@pytest.mark.parametrize(
    "text",
    [
        "1 / (depth - 3) < 1",
        "1 % (depth - 3) >= 0",
        "(depth - 3) ** -1 < 1",
        "log(depth - 3) < 1",
        "log2(-depth) < 1",
        "sqrt(-depth) < 1",
        "(-depth) ** 0.5 != 2",  # complex
        "1e300 ** depth > 1",
        "1e200 * 10 ** 200 > 1",
        "not 1e200 * 1e200 * 0 < 1",  # not inf, nor NaN, which no comparison likes
        "10 ** 10 ** 10 ** 10 > 1",
        "9 ** 9 ** 9 ** 9 ** 9 > 1",
        "(((depth ** 64) ** 64) ** 64) ** 64 > 1",
        "not 1 / (depth - 3) < 1",
    ],
)
def test_it_does_not_hold_where_it_cannot_be_computed(text: str) -> None:
    assert holds(text, depth=3) is False


def test_what_is_decided_before_is_not_computed() -> None:
    assert holds("depth == 0 or 10 / depth > 2", depth=0)
    assert not holds("depth != 0 and 10 / depth > 2", depth=0)


def test_large_powers_are_those_of_floats() -> None:
    assert holds("1.01 ** 1000 > 20000")
    assert holds("2 ** 64 == 18446744073709551616")
    assert holds("depth ** 100 > 1", depth=3)
    assert math.isclose(3.0**100, 3**100)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("width <", "is not an expression"),
        ("", "is not an expression"),
        ("width < 3; 1", "is not an expression"),
        ("width = 3", "is not an expression"),
        ("model.args.lambda < 3", "is not an expression"),  # a word of Python
        ("width", "is neither true nor false; compare it with something"),
        ("width + 1", "is neither true nor false; compare it with something"),
        ("'yes'", "is neither true nor false; compare it with something"),
        ("max(width, 1)", "is neither true nor false; compare it with something"),
        ("width and width + 1", f"has 'width and width + 1' in it; {ALLOWED}"),
        ("not 3", f"has 'not 3' in it; {ALLOWED}"),
        ("width[0] < 3", f"has 'width[0]' in it; {ALLOWED}"),
        ("exp(width) < 3", f"has 'exp(width)' in it; {ALLOWED}"),
        ("__import__('os').system('ls') == 0",
         f"has '__import__('os').system('ls')' in it; {ALLOWED}"),
        ("'a'.join == 0", f"has ''a'.join' in it; {ALLOWED}"),
        ("log(width, base=2) < 3", f"has 'log(width, base=2)' in it; {ALLOWED}"),
        ("min(*width, 1) < 3", f"has '*width' in it; {ALLOWED}"),
        ("log(width, 2) < 3", "has log without one value"),
        ("min(width) < 3", "has min without two values or more"),
        ("width is 3", f"has 'width is 3' in it; {ALLOWED}"),
        ("width << 3 < 3", f"has 'width << 3' in it; {ALLOWED}"),
        ("~width < 3", f"has '~width' in it; {ALLOWED}"),
        ("+width < 3", f"has '+width' in it; {ALLOWED}"),
        ("width == None", f"has 'None' in it; {ALLOWED}"),
        ("width == 1j", f"has '1j' in it; {ALLOWED}"),
        ("width < 1e999", f"has '1e309' in it; {ALLOWED}"),
        ("width == [1]", f"has '[1]' in it; {ALLOWED}"),
        ("width in 3", "has an 'in' without a list of values, as in [1, 2]"),
        ("width in 'abc'", "has an 'in' without a list of values, as in [1, 2]"),
        ("width in [depth]", "has an 'in' without a list of values, as in [1, 2]"),
        ("(lambda: 1) == 1", f"has 'lambda: 1' in it; {ALLOWED}"),
        ("(1 if width else 2) == 1", f"has '1 if width else 2' in it; {ALLOWED}"),
        ("[x for x in width] == 1", f"has '[x for x in width]' in it; {ALLOWED}"),
        ("f'{width}' == '1'", f"has 'f'{{width}}'' in it; {ALLOWED}"),
        ("(x := 3) < 4", f"has '(x := 3)' in it; {ALLOWED}"),
    ],
)  # fmt: skip
def test_a_mistake_gets_one_line(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=r"^'") as caught:
        Expression.parse(text)
    assert str(caught.value) == f"'{text}' {said}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1" * 1001 + " < a", "is longer than 1000 characters"),
        ("-" * 200 + "a < 1", "is nested too deeply"),
        ("a < " + " + ".join(["a"] * 150), "is nested too deeply"),
    ],
)
def test_nothing_can_exhaust_the_stack(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=rf" {said}$"):
        Expression.parse(text)
    with pytest.raises(ValueError, match=r" is (not an expression|nested too deeply)$"):
        Expression.parse("(" * 490 + "a < 1" + ")" * 490)
    with pytest.raises(ValueError, match=r" is (not an expression|nested too deeply)$"):
        Expression.parse("-" * 990 + "a < 1")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kind < 3", "'<' not supported between instances of 'str' and 'int'"),
        ("kind * 9999999999 == 'a'", "'cnn' is no number to compute with"),
        ("kind % 3 == 'a'", "'cnn' is no number to compute with"),
        ("-kind == 'a'", "'cnn' is no number to compute with"),
        ("log(kind) < 3", "'cnn' is no number to compute with"),
        ("depth == 3 and depth", "depth is 3, which is neither true nor false"),
    ],
)
def test_values_that_do_not_go_together_are_the_users_to_mend(text: str, said: str) -> None:
    with pytest.raises(N3LOError) as caught:
        holds(text, kind="cnn", depth=3)
    assert str(caught.value) == f"search.constraints: '{text}': {said}"
