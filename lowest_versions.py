"""Print the lowest version that pyproject.toml allows of each library, as pip's constraints.

`make lowest` sets up an environment of these and runs tests in it.
"""

from __future__ import annotations

import tomllib
from itertools import chain
from pathlib import Path

from packaging.requirements import Requirement

PROJECT = tomllib.loads(Path(__file__).with_name("pyproject.toml").read_text())["project"]


def lowest() -> dict[str, str]:
    """Name -> version, of all direct dependencies that have a lower bound."""
    extras = PROJECT["optional-dependencies"].values()
    found = {}
    for text in (*PROJECT["dependencies"], *chain(*extras)):
        requirement = Requirement(text)
        for bound in requirement.specifier:
            if bound.operator in (">=", "=="):
                found[requirement.name] = bound.version
    return found


if __name__ == "__main__":
    for name, version in sorted(lowest().items()):
        print(f"{name}=={version}")
