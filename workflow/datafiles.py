"""Commands that look at data files, and write them anew.

They are read in a process of its own: the driver imports no h5py.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path

from apps.contract import write_json
from workflow import study, trained
from workflow.plan import absolute
from workflow.whole import check_file

NEEDS = ("h5py",)


def check(paths: Sequence[Path], runs: Path, as_json: bool) -> None:
    """Print what data files hold, or what the fields of studies hold in theirs.

    Raises:
        N3LOError: a file or a study cannot be read.
    """
    words = ["--json"] if as_json else []
    with tempfile.TemporaryDirectory(prefix="n3lo-") as folder:
        for number, path in enumerate(path for path in paths if path.suffix == ".toml"):
            words += ["--study", str(_data_of(path, runs, Path(folder, f"{number}.json")))]
        files = [str(path) for path in paths if path.suffix != ".toml"]
        trained.run_program("datacheck", [*words, "--", *files], NEEDS)


def _data_of(path: Path, runs: Path, to: Path) -> Path:
    """Write the section [data] of a study, with its files as they are found."""
    file = study.load(path)
    files = [str(each) for each in file.data_files(runs / "cache" / "data")]
    reader = file.study.data.reader
    found = {"files": files, "reader": reader and absolute(file, reader)}
    write_json(to, dataclasses.asdict(file.study.data) | found)
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
    words += ["--compression", compression, "--to", str(to), "--", *map(str, files)]
    trained.run_program("convert", words, NEEDS)
