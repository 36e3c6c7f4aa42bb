"""Commands that look at data files, and write them anew.

They are read in a process of its own: the driver imports no h5py.
"""

from __future__ import annotations

import dataclasses
import glob
import tempfile
from collections.abc import Sequence
from pathlib import Path

from apps.contract import N3LOError, write_json
from workflow import study, trained
from workflow.plan import absolute
from workflow.whole import check_file

NEEDS = ("h5py",)


def check(paths: Sequence[Path], runs: Path, as_json: bool) -> None:
    """Print what data files hold, or what the fields of studies hold in theirs.

    Raises:
        N3LOError: a file or a study cannot be read.
    """
    paths = found(paths)
    words = ["--json"] if as_json else []
    with tempfile.TemporaryDirectory(prefix="n3lo-") as folder:
        for number, path in enumerate(path for path in paths if path.suffix == ".toml"):
            words += ["--study", str(_data_of(path, runs, Path(folder, f"{number}.json")))]
        files = [str(path) for path in paths if path.suffix != ".toml"]
        trained.run_program("datacheck", [*words, "--", *files], NEEDS)


def found(patterns: Sequence[Path]) -> list[Path]:
    """The files that patterns match, sorted, where the shell has left them as they are.

    Raises:
        N3LOError: one matches none.
    """
    files: list[Path] = []
    for pattern in patterns:
        matches = matching(str(pattern))
        if not matches and glob.has_magic(str(pattern)):
            raise N3LOError(f"no file matches '{pattern}'")
        files += map(Path, matches or [str(pattern)])  # what is not there is told by its reader
    return files


def matching(pattern: str) -> list[str]:
    """Of a file that is there, itself, though brackets be in its name."""
    path = Path(pattern).expanduser()
    return [str(path)] if path.exists() else sorted(glob.glob(str(path)))


def _data_of(path: Path, runs: Path, to: Path) -> Path:
    """Write the section [data] of a study, with its files as they are found."""
    file = study.load(path)
    files = [str(each) for each in file.data_files(runs / "cache" / "data")]
    reader = file.study.data.reader
    as_found = {
        "files": files,
        "file_numbers": file.file_numbers(),
        "reader": reader and absolute(file, reader),
    }
    write_json(to, dataclasses.asdict(file.study.data) | as_found)
    return to


def convert(
    files: Sequence[Path],
    to: Path,
    fields: Sequence[str],
    compression: str,
    events_per_file: int | None,
) -> None:
    """Write data files anew as HDF5; see `apps.convert`.

    Raises:
        N3LOError: a file cannot be read or written.
    """
    check_file(to)
    words = ["--fields", *fields] if fields else []
    words += [] if events_per_file is None else ["--events-per-file", str(events_per_file)]
    words += ["--compression", compression, "--to", str(to), "--", *map(str, found(files))]
    trained.run_program("convert", words, NEEDS)
