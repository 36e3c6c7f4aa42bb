"""Digests of what a result depends on besides the study's text: data, model source, our own code.

Nothing is imported to find them: a model's source is followed through its import statements.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path

import apps
from apps.contract import Fingerprint, N3LOError, write_json
from workflow.study import StudyFile

_INSTALLED = tuple(
    Path(sysconfig.get_path(name)).resolve()
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_APPS = Path(apps.__file__).resolve().parent


def fingerprint(file: StudyFile, memo: Path) -> Fingerprint:
    """The digests of a study.

    Args:
        file: the study.
        memo: a JSON file that remembers the digests of data files by size and time of change, so
            that large files are read only once.
    """
    return Fingerprint(
        data=_of_data(file.data_files(), memo), model=_of_model(file), code=_of_code()
    )


def _of_data(files: list[Path], memo: Path) -> str:
    known = _read_memo(memo)
    fresh = {}
    for path in files:
        stat = path.stat()
        stamp = [stat.st_size, stat.st_mtime_ns, stat.st_ino]
        entry = known.get(str(path))
        if entry is None or entry[:-1] != stamp:
            with open(path, "rb") as opened:
                entry = [*stamp, hashlib.file_digest(opened, "sha256").hexdigest()]
        fresh[str(path)] = entry
    if any(known.get(path) != entry for path, entry in fresh.items()):
        write_json(memo, {**known, **fresh})
    return _digest(entry[-1] for entry in fresh.values())


def _read_memo(memo: Path) -> dict[str, list[int | str]]:
    try:
        content = json.loads(memo.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _of_model(file: StudyFile) -> str:
    return _digest(path.read_text() for path in sorted(_with_local_imports(model_file(file))))


def model_file(file: StudyFile) -> Path:
    """The file of a study's model.

    Raises:
        N3LOError: there is no such file or module.
    """
    source, _, _ = file.study.model.source.partition(":")
    where = file.where("model", "source") + "model.source"
    if source.endswith(".py"):
        path = (file.path.parent / Path(source).expanduser()).resolve()
        if not path.is_file():
            raise N3LOError(f"{where}: there is no file '{source}' ({path})")
        return path
    found = _find_module(source, [])
    if found is None:
        raise N3LOError(
            f"{where}: there is no module '{source}'; a file of your own is named as "
            f"'my_model.py:Name', relative to the study"
        )
    return found


def _of_code() -> str:
    """Of the training program: all of `apps` but the models and what only starts jobs."""
    outside = {_APPS / "launch.py", _APPS / "check.py", *(_APPS / "models").glob("*.py")}
    return _digest(path.read_text() for path in sorted(_APPS.rglob("*.py")) if path not in outside)


def _digest(texts: Iterable[int | str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(hashlib.sha256(str(text).encode()).digest())
    return digest.hexdigest()[:16]


def _with_local_imports(start: Path) -> set[Path]:
    """A Python file and all that it imports, directly or not, except what is installed or ours."""
    seen: set[Path] = set()
    waiting = [start]
    while waiting:
        path = waiting.pop()
        if path in seen or path.suffix != ".py":
            continue
        seen.add(path)
        try:
            tree = ast.parse(path.read_text())
        except SyntaxError:
            continue  # apps.check reports it, with its line
        for module in _imported_modules(tree):
            found = _find_module(module, [str(path.parent)])
            if found is not None and not _is_elsewhere(found):
                waiting.append(found)
    return seen


def _is_elsewhere(path: Path) -> bool:
    """Installed, or our own, which has a digest of its own."""
    in_models = path.is_relative_to(_APPS / "models")
    return any(map(path.is_relative_to, _INSTALLED)) or (
        path.is_relative_to(_APPS) and not in_models
    )


def _imported_modules(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if base:
                yield base
            yield from (f"{base}.{alias.name}".lstrip(".") for alias in node.names)


def _find_module(name: str, first: list[str]) -> Path | None:
    """The file of a module, looked up part by part without importing its parents."""
    search: list[str] | None = [*first, *sys.path]
    origin: str | None = None
    for part in name.split("."):
        spec = PathFinder.find_spec(part, search)
        if spec is None:
            return None
        origin = spec.origin
        search = list(spec.submodule_search_locations or [])
    return Path(origin).resolve() if origin and Path(origin).is_file() else None
