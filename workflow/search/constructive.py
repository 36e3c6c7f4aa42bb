"""Networks built layer by layer: each new layer's size is searched, and kept if it is a gain.

After Pasini et al. 2019, arXiv:1909.03306.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from apps.contract import N3LOError
from workflow.search import create
from workflow.search.base import Observation, Problem, Proposal, Search
from workflow.search.halving import PROPOSERS
from workflow.space import Choice, Dimension, Point, Real, Scalar, Space


class ConstructiveSearch(Search):
    """One layer after the other, until a layer brings no gain.

    - The first stage has the least depth. It searches the sizes of its layers and all dimensions
      that are no layer sizes.
    - Each further stage takes the best trial so far, adds a layer (goes to the next depth) and
      searches the size of that layer; all else is as in the best. Only what had no value there, its
      condition not being met, is searched with it.
    - A stage is `per_layer` trials, fewer if it has no more points. It is a barrier: the next one
      begins when all have ended.
    - It ends when the best trial of a stage is not better than that of the stages before, or not by
      `min_gain`; when all trials of a stage have failed; or after the greatest depth.
    - Sizes beyond the depth are left out where a condition says so; else they have their least
      value, which the model ignores.

    With `proposer` = "bayesian" the first half of a stage is a Sobol design, as needed.

    Options:
        depth: the dimension that is the number of layers: an integer or ordinal; required.
        sizes: the dimensions of the layers' sizes, from the first layer on; required.
        per_layer: 8 by default.
        min_gain: the least improvement of the figure of merit that counts; 0 by default.
        proposer: "bayesian", "random" or "sobol"; "bayesian" by default.
    """

    name = "constructive"
    knows: ClassVar[Mapping[str, type]] = {
        "depth": str,
        "sizes": list,
        "per_layer": int,
        "min_gain": float,
        "proposer": str,
    }

    def __init__(self, problem: Problem, options: Mapping[str, Any]) -> None:
        super().__init__(problem, options)
        self.per_layer: int = self.option("per_layer", 8, low=1)
        self.min_gain: float = self.option("min_gain", 0.0, low=0.0)
        self.proposer: str = self.option("proposer", PROPOSERS[0], among=PROPOSERS)
        for option, example in (("depth", "'model.args.depth'"), ("sizes", "['model.args.size']")):
            if option not in self.options:
                raise N3LOError(f"search.options.{option}: is needed, as in {option} = {example}")
        self.depth: str = self.options["depth"]
        self.sizes: list[str] = self.options["sizes"]
        self.depths = [int(level) for level in self._levels("depth", self.depth)]
        for path in self.sizes:
            self._levels("sizes", path)
        self._check_sizes()

    def stage(self, depth: int, best: Point | None) -> Space:
        """What is searched at that depth: dimensions that are not have one value.

        Args:
            best: of the stages before; None in the first.
        """
        place = self.depths.index(depth)
        num_old = self.depths[place - 1] if place > 0 else 0
        dimensions: dict[str, Dimension] = {}
        for path, dimension in self.space.dimensions.items():
            layer = self.sizes.index(path) + 1 if path in self.sizes else None
            if path == self.depth:
                dimensions[path] = _fixed(dimension, depth)
            elif layer is not None and layer > depth:
                dimensions[path] = _fixed(dimension, _levels(dimension)[0])
            elif best is None or path not in best or (layer is not None and layer > num_old):
                dimensions[path] = dimension
            else:
                dimensions[path] = _fixed(dimension, best[path])
        return replace(self.space, dimensions=dimensions)

    def _next(
        self,
        history: Sequence[Observation],
        pending: Sequence[Proposal],
        rng: np.random.Generator,
    ) -> Proposal | None:
        """The next trial; None to wait for the stage's end or, with none pending, at the end."""
        # Rows from before the study's space was narrowed say nothing about this one.
        history = [
            replace(seen, proposal=replace(seen.proposal, point=self._plain(seen.point)))
            for seen in history
            if self.space.contains(seen.point)
        ]
        layers = [each.tags["layer"] for each in _known(history, pending) if "layer" in each.tags]
        layer = max(layers, default=self.depths[0])
        before = self._best([o for o in history if o.proposal.tags.get("layer", layer) < layer])
        here = self._best([o for o in history if o.proposal.tags.get("layer") == layer])
        if layers.count(layer) < self.per_layer:
            proposal = self._proposal(layer, before, history, pending, rng)
            if proposal is not None:
                return proposal
        if pending or here is None:
            return None
        gain = math.inf if before is None else self.cost(before) - self.cost(here)
        deeper = [depth for depth in self.depths if depth > layer]
        if not deeper or gain <= 0 or gain < self.min_gain:
            return None
        return self._proposal(deeper[0], here, history, pending, rng)

    def _best(self, seen: Sequence[Observation]) -> Observation | None:
        best = min(seen, key=self.cost, default=None)  # the first of equals
        return best if best is not None and math.isfinite(self.cost(best)) else None

    def _proposal(
        self,
        depth: int,
        best: Observation | None,
        history: Sequence[Observation],
        pending: Sequence[Proposal],
        rng: np.random.Generator,
    ) -> Proposal | None:
        """A new point of the stage; None if it has no more."""
        space = self.stage(depth, None if best is None else best.point)
        try:
            space.sample(np.random.default_rng(self.problem.seed))
        except N3LOError:  # the constraints leave none
            return None
        options = {}
        if self.proposer == "bayesian":
            num_free = sum(dimension.size > 1 for dimension in space.dimensions.values())
            options["num_initial"] = max(1, min(2 * num_free + 2, self.per_layer // 2))
        proposer = create(self.proposer, replace(self.problem, space=space), options)
        plain = [replace(seen, proposal=Proposal(seen.point)) for seen in history]
        answer = proposer.propose(plain, [Proposal(each.point) for each in pending], 1, rng)
        return Proposal(answer[0].point, tags={"layer": depth}) if answer else None

    def _plain(self, point: Point) -> Point:
        return {path: self.space.dimensions[path].plain(value) for path, value in point.items()}

    def _levels(self, option: str, path: Any) -> Sequence[Scalar]:
        """
        Raises:
            N3LOError: what the option names is no dimension of whole numbers.
        """
        dimension = self.space.dimensions.get(path) if isinstance(path, str) else None
        if dimension is None:
            near = difflib.get_close_matches(str(path), self.space.dimensions, n=1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise N3LOError(
                f"search.options.{option}: {path!r} is no dimension of search.space{hint}"
            )
        levels = [] if isinstance(dimension, Choice) else _levels(dimension)
        if not levels or any(type(level) is not int for level in levels):
            raise N3LOError(
                f"search.options.{option}: '{path}' is not of type 'int' or 'ordinal' with whole "
                "numbers"
            )
        return levels

    def _check_sizes(self) -> None:
        """
        Raises:
            N3LOError: the sizes are not those of as many layers as there can be.
        """
        twice = [path for path in self.sizes if self.sizes.count(path) > 1 or path == self.depth]
        if twice:
            raise N3LOError(f"search.options.sizes: '{twice[0]}' is named twice")
        if len(self.sizes) < self.depths[-1]:
            raise N3LOError(
                f"search.options.sizes: has {len(self.sizes)} for the up to {self.depths[-1]} "
                f"layers of '{self.depth}'"
            )


def _known(history: Sequence[Observation], pending: Sequence[Proposal]) -> list[Proposal]:
    return [*(seen.proposal for seen in history), *pending]


def _levels(dimension: Dimension) -> Sequence[Scalar]:
    """All values that it can have; none of a real one."""
    return [] if isinstance(dimension, Real) else dimension.levels()


def _fixed(dimension: Dimension, value: Scalar) -> Dimension:
    """A dimension of one value, under the same condition."""
    return Choice(values=[value], when=dimension.when)
