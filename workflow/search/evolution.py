"""Evolution: each generation of trials is bred from the fittest of the one before.

For wide runs, where a whole generation trains at once, and for objectives that are rough or have
many dimensions. A point is the chromosome, a dimension's value a gene.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from typing import Any, ClassVar

import numpy as np

from workflow.search.base import Observation, Problem, Proposal, Search, draw
from workflow.space import Choice, Dimension, Point, Real, Scalar, Space

LEAST = 0.1  # what is left of the mutation's width in the last generations
JUMP = 5.0  # a choice changes with this times the width as its probability
NUM_TRIES = 50  # mutations of a child that is taken or illegal before a point is drawn instead


class EvolutionSearch(Search):
    """Elites, binary tournaments, interpolation, and mutations that shrink.

    - Generation 0 is `population` random points, generation g + 1 the elites of g and their
      offspring. The elites are the fittest `elite_fraction` of a generation, at least one; they are
      in the ledger and not trained again, so that `population` - elites trials are new.
    - Fitness is the rank of the figure of merit. Failed trials have the worst rank; equals are
      ranked by their number.
    - A parent is the fitter of two distinct random members of the generation before, elites
      included; the second parent is chosen likewise among the others.
    - Crossover: child = a + r (b - a) for each gene, r uniform in (0, 1), in the unit coordinates
      of the space: a logarithmic dimension in its logarithm, integers and ordered values by their
      bins. A choice is either parent's with probability 1/2. A gene that one parent lacks, its
      condition not being met there, is the other's; one that both lack is drawn.
    - Mutation: each gene with probability `mutation_rate`. A number moves by N(0, s_g) in its unit
      coordinate, reflected at 0 and 1, where s_g = `mutation` max(0.1, 1 - g/G) in generation g of
      G. An integer or ordered value moves by one step at least. A choice becomes another with
      probability min(1, 5 s_g).
    - A child that is known already or breaks a constraint is mutated again in each gene; after 50
      times, or where a whole generation failed, a random point takes its place.

    A generation is a barrier: the next one waits until all of it have ended, in whatever state.
    With `steady_state` there is none: once `population` trials have been proposed at random, each
    further one is the child of two of the best `population` that have ended.

    Rows without the tag "generation" (of a warm start or another method) are of generation 0, which
    proposes fewer for them; if they are more than `population`, the fittest are that generation.

    Options:
        population: 10 by default, at least 4.
        elite_fraction: 0.2 by default.
        mutation: the width of a mutation at first, as a fraction of the range; 0.1 by default.
        mutation_rate: 0.5 by default.
        steady_state: false by default.
    """

    name = "evolution"
    knows: ClassVar[Mapping[str, type]] = {
        "population": int,
        "elite_fraction": float,
        "mutation": float,
        "mutation_rate": float,
        "steady_state": bool,
    }

    def __init__(self, problem: Problem, options: Mapping[str, Any]) -> None:
        super().__init__(problem, options)
        self.population: int = self.option("population", 10, low=4)
        fraction = self.option("elite_fraction", 0.2, low=0.0, high=1.0)
        self.num_elites = min(max(1, round(fraction * self.population)), self.population - 1)
        self.mutation: float = self.option("mutation", 0.1, low=0.0, high=1.0)
        self.mutation_rate: float = self.option("mutation_rate", 0.5, low=0.0, high=1.0)
        self.steady_state: bool = self.option("steady_state", False)

    def _next(
        self,
        history: Sequence[Observation],
        pending: Sequence[Proposal],
        rng: np.random.Generator,
    ) -> Proposal | None:
        # Rows from before the study's space was narrowed say nothing about this one.
        history = [seen for seen in history if self.space.contains(seen.point)]
        pending = [each for each in pending if self.space.contains(each.point)]
        known = [*(seen.proposal for seen in history), *pending]
        taken = {self.space.identity(each.point) for each in known}
        generation = self._generation(history, pending)
        if generation is None:
            return None
        parents = [history[index].point for index in self._parents(history, generation)]
        point = self._child(parents, generation, taken, rng)
        return None if point is None else Proposal(point, tags={"generation": generation})

    @property
    def num_generations(self) -> int:
        """How many the study's budget allows; G above."""
        further = self.problem.num_trials - self.population
        each = self.population if self.steady_state else self.population - self.num_elites
        return max(1, math.ceil(further / each) + 1)

    def width(self, generation: int) -> float:
        """Of its mutations; s_g above."""
        return self.mutation * max(LEAST, 1 - generation / self.num_generations)

    def members(self, history: Sequence[Observation], generation: int) -> list[int]:
        """The generation's population that has ended, elites included: indices, fittest first."""
        found: list[int] = []
        for g in range(generation + 1):
            born = [i for i, seen in enumerate(history) if _generation(seen.proposal) == g]
            ranked = self.ranked(history, [*found[: self.num_elites], *born])
            found = ranked[: self.population]
        return found

    def ranked(self, history: Sequence[Observation], indices: Sequence[int]) -> list[int]:
        """The fittest first; the history is by number, so that the index decides between equals."""
        return sorted(indices, key=lambda index: (self.cost(history[index]), index))

    def _generation(
        self, history: Sequence[Observation], pending: Sequence[Proposal]
    ) -> int | None:
        """The one that the next trial belongs to; None if it has to wait."""
        if self.steady_state:
            return (len(history) + len(pending)) // self.population
        ended = [_generation(seen.proposal) for seen in history]
        running = [_generation(each) for each in pending]
        latest = max([*ended, *running], default=0)
        size = self.population if latest == 0 else self.population - self.num_elites
        if ended.count(latest) + running.count(latest) < size:
            return latest
        return None if latest in running else latest + 1

    def _parents(self, history: Sequence[Observation], generation: int) -> list[int]:
        """Those that may be; none for a generation that is drawn at random."""
        if generation == 0:
            return []
        if self.steady_state:
            found = self.ranked(history, range(len(history)))[: self.population]
        else:
            found = self.members(history, generation - 1)
        is_hopeless = len(found) < 2 or math.isinf(self.cost(history[found[0]]))
        return [] if is_hopeless else found

    def _child(
        self,
        ranked: Sequence[Point],
        generation: int,
        taken: Set[str],
        rng: np.random.Generator,
    ) -> Point | None:
        """A new point bred from `ranked`, the fittest first; drawn if that fails or is empty."""
        if ranked:
            genes = crossover(self.space, *choose(ranked, rng), rng)
            rate = self.mutation_rate
            for _ in range(NUM_TRIES):
                genes = mutate(self.space, genes, self.width(generation), rate, rng)
                point = express(self.space, genes)
                if self.space.contains(point) and self.space.identity(point) not in taken:
                    return point
                rate = 1.0
        return next(iter(draw(self.space, taken, rng)), None)


def choose(ranked: Sequence[Point], rng: np.random.Generator) -> tuple[Point, Point]:
    """Two parents, each by a binary tournament. `ranked`: two or more, the fittest first."""
    first = tournament(len(ranked), rng)
    others = [*ranked[:first], *ranked[first + 1 :]]
    return ranked[first], others[tournament(len(others), rng)]


def tournament(num: int, rng: np.random.Generator) -> int:
    """The better rank of two distinct ones drawn from 0, 1, ... `num` - 1, where 0 is the best."""
    return int(rng.choice(num, size=min(num, 2), replace=False).min())


def crossover(space: Space, first: Point, second: Point, rng: np.random.Generator) -> Point:
    """A gene for each dimension, those whose condition is not met included."""
    genes: Point = {}
    for path, dimension in space.dimensions.items():
        r = rng.random()
        a, b = first.get(path), second.get(path)
        if a is not None and b is not None:
            genes[path] = _between(dimension, a, b, r)
        elif a is not None or b is not None:
            genes[path] = dimension.plain(a if a is not None else b)  # type: ignore[arg-type]
        else:
            genes[path] = dimension.decode(r)
    return genes


def mutate(
    space: Space, genes: Point, width: float, rate: float, rng: np.random.Generator
) -> Point:
    """Each gene moved with probability `rate`."""
    return {
        path: _moved(dimension, genes[path], width, rng) if rng.random() < rate else genes[path]
        for path, dimension in space.dimensions.items()
    }


def express(space: Space, genes: Point) -> Point:
    """The point of these genes: without those whose condition is not met."""
    unit = np.array([d.encode(genes[path]) for path, d in space.dimensions.items()], dtype=float)
    return {path: genes[path] for path in space.decode(unit)}


def _between(dimension: Dimension, a: Scalar, b: Scalar, r: float) -> Scalar:
    """What lies at the fraction `r` of the way from `a` to `b`; a choice is one of them."""
    if isinstance(dimension, Choice):
        return a if r < 0.5 else b
    start, end = dimension.encode(a), dimension.encode(b)
    value = dimension.decode(start + r * (end - start))
    if isinstance(dimension, Real):  # against rounding
        return min(max(value, float(min(a, b))), float(max(a, b)))
    return value


def _moved(dimension: Dimension, value: Scalar, width: float, rng: np.random.Generator) -> Scalar:
    if isinstance(dimension, Choice):
        others = [each for i, each in enumerate(dimension.values) if i != dimension.index(value)]
        jumps = bool(others) and rng.random() < JUMP * width
        return others[int(rng.integers(len(others)))] if jumps else value
    step = rng.normal(0.0, width) if width > 0 else 0.0
    moved = dimension.decode(_reflected(dimension.encode(value) + step))
    if not isinstance(dimension, Real) and moved == value and step != 0:
        return _neighbour(dimension.levels(), value, up=step > 0)
    return moved


def _reflected(u: float) -> float:
    """`u` as a ball that bounces between 0 and 1 would come to lie."""
    return 1 - abs(u % 2 - 1)


def _neighbour(levels: Sequence[Scalar], value: Scalar, *, up: bool) -> Scalar:
    """The next level; at an end, the one on the other side."""
    at = levels.index(value)
    to = at + 1 if up else at - 1
    if not 0 <= to < len(levels):
        to = 2 * at - to
    return levels[to] if 0 <= to < len(levels) else value


def _generation(proposal: Proposal) -> int:
    return proposal.tags.get("generation", 0)
