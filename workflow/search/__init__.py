"""Search methods by name. To add one: a file beside these with a `Search`, and a line below."""

from __future__ import annotations

import difflib
import pkgutil
from collections.abc import Mapping
from typing import Any

from apps.contract import N3LOError
from workflow.search.base import Goal, Observation, Search
from workflow.space import Space

__all__ = ["METHODS", "Goal", "Observation", "Search", "create"]

# Where each class is. Imported when asked for: scikit-learn alone takes seconds to import.
METHODS = {
    "random": "workflow.search.random_search:RandomSearch",
    "grid": "workflow.search.grid:GridSearch",
    "bayesian": "workflow.search.bayesian:BayesianSearch",
}


def create(
    method: str,
    space: Space,
    goal: Goal,
    options: Mapping[str, Any],
    seed: int,
) -> Search:
    """The search of that name; see `Search` for the rest.

    Raises:
        N3LOError: there is no such method, or it does not take these options.
    """
    if method not in METHODS:
        near = difflib.get_close_matches(method, METHODS, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise N3LOError(
            f"search.method: unknown method '{method}'; there are: {', '.join(METHODS)}{hint}"
        )
    search: Search = pkgutil.resolve_name(METHODS[method])(space, goal, options, seed)
    return search
