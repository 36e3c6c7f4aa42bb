"""Search methods by name. To add one: a file beside these with a `Search`, and a line below."""

from __future__ import annotations

import difflib
import pkgutil
from collections.abc import Mapping
from typing import Any

from apps.contract import N3LOError
from workflow.search.base import Goal, Observation, Problem, Proposal, Search

__all__ = ["METHODS", "Goal", "Observation", "Problem", "Proposal", "Search", "create"]

# Where each class is. Imported when asked for: scikit-learn alone takes seconds to import.
METHODS = {
    "bayesian": "workflow.search.bayesian:BayesianSearch",
    "multi": "workflow.search.multi:MultiObjectiveSearch",
    "skopt": "workflow.search.scikit:ScikitSearch",
    "optuna": "workflow.search.optuna_engine:OptunaSearch",
    "evolution": "workflow.search.evolution:EvolutionSearch",
    "population": "workflow.search.population:PopulationSearch",
    "halving": "workflow.search.halving:HalvingSearch",
    "constructive": "workflow.search.constructive:ConstructiveSearch",
    "grid": "workflow.search.grid:GridSearch",
    "random": "workflow.search.random_search:RandomSearch",
    "sobol": "workflow.search.sobol:SobolSearch",
}


def create(method: str, problem: Problem, options: Mapping[str, Any]) -> Search:
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
    search: Search = pkgutil.resolve_name(METHODS[method])(problem, options)
    return search
