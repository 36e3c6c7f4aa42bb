"""Digests of what a result depends on besides the study's text: data, model source, our own code.

Nothing is imported to find them: a model's source is followed through its import statements.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import apps
from apps.contract import Fingerprint, N3LOError, package_of, sources_of, write_json
from workflow import extras
from workflow.space import Choice, Dimension
from workflow.study import StudyFile

_INSTALLED = tuple(
    Path(sysconfig.get_path(name)).resolve()
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_APPS = Path(apps.__file__).resolve().parent
# Programs that start, check or use a training, of which the training itself imports nothing.
BESIDE = (
    *("launch", "room", "scout", "probe", "check", "draft", "mistakes", "suited", "opened"),
    *("trained", "export", "generate", "ensemble", "predict", "new_h5", "datacheck", "convert"),
    "nnlo_import",
)


def fingerprint(file: StudyFile, data_files: list[Path], memo: Path) -> Fingerprint:
    """The digests of a study.

    Args:
        file: the study.
        data_files: its data, as `StudyFile.data_files` has them.
        memo: a JSON file that remembers the digests of data files by size and time of change, so
            that large files are read only once.
    """
    return Fingerprint(data=_of_data(data_files, memo), model=_of_model(file), code=_of_code())


def _of_data(files: list[Path], memo: Path) -> str:
    known = _read_memo(memo)
    fresh = {}
    for path in files:
        stat = path.stat()
        stamp = [stat.st_size, stat.st_mtime_ns, stat.st_ino]
        entry = known.get(str(path))
        if entry is None or entry[:-1] != stamp:
            entry = [*stamp, _of_file(path)]
        fresh[str(path)] = entry
    if any(known.get(path) != entry for path, entry in fresh.items()):
        write_json(memo, {**known, **fresh})
    return _digest(str(entry[-1]).encode() for entry in fresh.values())


def _of_file(path: Path) -> str:
    with open(path, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _read_memo(memo: Path) -> dict[str, list[int | str]]:
    try:
        content = json.loads(memo.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _of_model(file: StudyFile) -> str:
    """Of the model, and of losses, metrics, a reader and a collate function that are not ours."""
    starts = {model_file(file), *other_files(file)}
    paths = {path for start in starts for path in _with_local_imports(start)}
    read = [_of_file(path).encode() for path in read_files(file)]
    return _digest([*map(Path.read_bytes, sorted(paths)), *read])


def read_files(file: StudyFile) -> list[Path]:
    """`model.files`, which the model's code reads.

    Raises:
        N3LOError: there is none of such a name.
    """
    found: list[Path] = []
    for name in file.study.model.files:
        files = [path for path in file.matching(name) if path.is_file()]
        if not files:
            raise N3LOError(f"{file.where('model', 'files')}model.files: there is no file '{name}'")
        found += files
    return found


def model_file(file: StudyFile) -> Path:
    """The file of a study's model.

    Raises:
        N3LOError: there is no such file or module.
    """
    return source_file(file, file.study.model.source, "model", "source")


def other_files(file: StudyFile) -> Iterator[Path]:
    """The files of a study's losses and metrics, `data.reader` and `data.collate`.

    Those that a search may put in place of the model's or the loss's are among them.

    Raises:
        N3LOError: there is no such file or module.
    """
    training, space = file.study.training, file.study.search.space
    for source in _searched(space, "model.source"):
        yield source_file(file, source, "model", "source")
    losses = [training.loss, *_searched(space, "training.loss")]
    for key, value in (("loss", losses), ("metrics", training.metrics)):
        for source in sources_of(value):
            yield source_file(file, source, "training", key)
    data = file.study.data
    for key, source in (("reader", data.reader), ("collate", data.collate)):
        if source is not None:
            yield source_file(file, source, "data", key)


def _searched(space: Mapping[str, Dimension], key: str) -> list[Any]:
    """What choices may put at a key, or below it."""
    return [
        value
        for path, each in space.items()
        if isinstance(each, Choice) and f"{path}.".startswith(f"{key}.")
        for value in each.values
    ]


def source_file(file: StudyFile, source: str, *key: str) -> Path:
    """Where "file.py:Name" or "package.module:Name" is.

    Args:
        key: of the study, that names it.

    Raises:
        N3LOError: there is no such file or module.
        ModuleNotFoundError: it is of a library that an extra has.
    """
    source = source.partition(":")[0]
    where = file.where(*key) + ".".join(key)
    if source.endswith(".py"):
        path = (file.path.parent / Path(source).expanduser()).resolve()
        if not path.is_file():
            raise N3LOError(f"{where}: there is no file '{source}' ({path})")
        return path
    library = source.partition(".")[0]
    if library in extras.KNOWN:
        extras.require(library)
    found = _module(source, sys.path) or beside(file.path.parent, source)
    if found is None:
        raise N3LOError(
            f"{where}: there is no module '{source}', neither in {sys.prefix} nor beside the "
            "study; a file of your own is named as 'my_model.py:Name' or 'my_package/model.py:Name'"
        )
    return found


def beside(folder: Path, module: str) -> Path | None:
    """The file of a module that lies in the study's folder, where ranks would not look for it."""
    folder = folder.resolve()
    elsewhere = [each for each in sys.path if each and Path(each).resolve() != folder]
    if module.startswith("apps.") or _module(module, elsewhere):
        return None
    return _module(module, [str(folder)])


def _module(name: str, search: list[str]) -> Path | None:
    files = _files(name, search)
    return files[-1] if len(files) > name.count(".") else None


def _of_code() -> str:
    """Of the training program: all of `apps` but what only models use, or works before or after."""
    outside = {_APPS / f"{name}.py" for name in BESIDE}
    return _digest(
        path.read_bytes()
        for path in sorted(_APPS.rglob("*.py"))
        if path not in outside and not _is_of_models(path)
    )


def _digest(contents: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for content in contents:
        digest.update(hashlib.sha256(content).digest())
    return digest.hexdigest()[:16]


def _with_local_imports(start: Path) -> set[Path]:
    """A Python file and all that it imports, directly or not, except what is installed or ours."""
    root, name = package_of(start)
    roots = [str(start.parent), str(root), *sys.path]  # as the ranks look for them
    seen: set[Path] = set()
    waiting = [start, *filter(None, _files(name, [str(root)]))]  # its packages are imported too
    while waiting:
        path = waiting.pop()
        if path in seen or path.suffix != ".py":
            continue
        seen.add(path)
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue  # apps.check reports it, with its line
        for name, search in _imports(tree, path.parent, roots):
            waiting += [file for file in _files(name, search) if file and not _is_elsewhere(file)]
    return seen


def _is_elsewhere(path: Path) -> bool:
    """Installed, or our own, which has a digest of its own."""
    return any(map(path.is_relative_to, _INSTALLED)) or (
        path.is_relative_to(_APPS) and not _is_of_models(path)
    )


def _is_of_models(path: Path) -> bool:
    """Ours, but counted for the models that import it."""
    return any(path.is_relative_to(_APPS / folder) for folder in ("models", "physics"))


def _imports(tree: ast.AST, folder: Path, roots: list[str]) -> Iterator[tuple[str, list[str]]]:
    """What a file in `folder` imports: full names, each with the folders to look for it in."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, roots) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = [str(folder.joinpath(*[".."] * (node.level - 1)))] if node.level else roots
            base = f"{node.module}." if node.module else ""
            yield from ((base + alias.name, above) for alias in node.names)


def _files(name: str, search: list[str] | None) -> list[Path | None]:
    """The file of each part of "package.module.Name", up to the first that is no module.

    Packages are looked into without importing them; one without __init__.py has no file (None).
    """
    files: list[Path | None] = []
    for part in name.split("."):
        spec = PathFinder.find_spec(part, search)
        if spec is None:
            break
        is_file = spec.origin is not None and Path(spec.origin).is_file()
        files.append(Path(str(spec.origin)).resolve() if is_file else None)
        search = list(spec.submodule_search_locations or [])
    return files
