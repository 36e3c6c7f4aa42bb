"""ROOT: the branches of trees, through uproot."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import awkward
import numpy as np
import uproot

from apps.contract import N3LOError
from apps.formats.source import CLASS_NUMBERS, Source
from apps.rows import Jagged, Rows, Runs

LONGEST_RUN = 65536  # events that are decoded at once


class Root(Source):
    """The branches of trees (TTree, RNTuple); the name of the only tree may be left out."""

    kind = "ROOT"

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.file = uproot.open(path, handler=uproot.source.file.MemmapSource)
        kinds = self.file.classnames(recursive=True, cycle=False)
        trees = [name for name, kind in kinds.items() if kind in ("TTree", "ROOT::RNTuple")]
        self._trees = {name: self.file[name] for name in trees}
        self._leaves = {name: _leaves(tree) for name, tree in self._trees.items()}
        self._starts = {name: _clusters(tree) for name, tree in self._trees.items()}
        self.trees = list(self._trees)

    @cached_property
    def names(self) -> list[str]:
        alone = len(self._trees) == 1
        return [
            leaf if alone else f"{tree}/{leaf}"
            for tree, leaves in self._leaves.items()
            for leaf in leaves
        ]

    @property
    def num_events(self) -> int:
        """Of the tree of the array that counts; else of that with the most branches."""
        counted = self._find(self._counted) if self._counted is not None else None
        largest = max(self._trees, key=lambda name: len(self._leaves[name]), default=None)
        tree = largest if counted is None else counted[0]
        return 0 if tree is None else int(self._trees[tree].num_entries)

    def has(self, name: str) -> bool:
        return self._find(name) is not None

    def _find(self, name: str) -> tuple[str, Any] | None:
        """The tree and the branch."""
        for tree_name, tree in self._trees.items():
            prefix = f"{tree_name}/"
            branch = name.removeprefix(prefix)
            whole = name.startswith(prefix) or len(self._trees) == 1
            if whole and branch in self._leaves[tree_name]:
                return tree_name, tree[branch]
        return None

    def missing(self) -> str:
        if len(self.trees) > 1:
            return ""
        return f"; its tree is called '{self.trees[0]}'" if self.trees else "; it has no tree"

    def members(self, group: str) -> list[str] | None:
        return self._leaves.get(group) or super().members(group)

    def _open(self, name: str) -> Rows | Jagged:
        found = self._find(name)
        assert found is not None
        starts, branch = self._starts[found[0]], found[1]

        def read(number: int) -> Any:
            first, end = starts[number : number + 2]
            return branch.array(entry_start=int(first), entry_stop=int(end), library="ak")

        def lists(number: int) -> tuple[np.ndarray, np.ndarray]:
            array = read(number)
            counts = awkward.to_numpy(awkward.num(array, axis=1))
            return counts, awkward.to_numpy(awkward.flatten(array, axis=1))

        kind = str(branch.array(entry_stop=0, library="ak").type)
        *axes, number = kind.split(" * ")[1:]
        try:
            dtype = np.dtype(number)
            shape = tuple(int(size) for size in axes if size != "var")
        except (TypeError, ValueError, SyntaxError):
            dtype, shape = np.dtype(object), ()
        if dtype.hasobject or "var" in axes[1:]:
            shown = " * ".join([*axes, number])
            mend = f"; {CLASS_NUMBERS}" if shown == "string" else ""
            raise N3LOError(
                f"{self.filename}: '{name}' holds {shown}, not numbers or lists of them{mend}"
            )
        if axes[:1] == ["var"]:
            return Jagged(starts, shape, dtype, lists)
        return Runs(starts, shape, dtype, lambda number: awkward.to_numpy(read(number)))

    def close(self) -> None:
        self.file.close()


def _leaves(tree: Any) -> list[str]:
    """The branches that hold values, and not others."""
    above = {name.rpartition("/")[0] for name in tree.keys()}  # noqa: SIM118  of uproot
    return [name for name in tree.keys() if name not in above]  # noqa: SIM118


def _clusters(tree: Any) -> np.ndarray:
    """Where the baskets or pages of all branches begin together, but not farther apart than
    LONGEST_RUN, and the end."""
    events = tree.num_entries
    if hasattr(tree, "cluster_summaries"):
        starts = [each.num_first_entry for each in tree.cluster_summaries]
    else:
        starts = tree.common_entry_offsets()
    return np.unique([0, *starts, *range(0, events, LONGEST_RUN), events])
