"""Files of events in the formats that are read, by one interface: HDF5, NumPy, Parquet, ROOT.

A file is a `Source`. Only the library of its own format is imported.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from apps.contract import N3LOError
from apps.formats.source import Source, stacked_names

__all__ = ["Source", "kinds_read", "open_file", "stacked_names"]

# By the end of a file's name: what messages call the format, and where its class is.
FORMATS = {
    **dict.fromkeys((".h5", ".hdf5", ".hdf"), ("HDF5", "hdf5", "Hdf5")),
    **{".npz": ("NumPy", "npy", "Npz"), ".npy": ("NumPy", "npy", "Npy")},
    **dict.fromkeys((".parquet", ".pq"), ("Parquet", "parquet", "Parquet")),
    ".root": ("ROOT", "root", "Root"),
}


def open_file(path: str, reader: str | None = None, number: np.generic | None = None) -> Source:
    """For reading, by the end of its name.

    Args:
        reader: `data.reader`, which reads it instead.
        number: what the field "@file" is for its events; None = 0.

    Raises:
        N3LOError: it is not there, is not to be read, or is of no format that is known.
    """
    where = f"data.files: '{path}'"
    if Path(path).is_dir():
        raise N3LOError(f"{where} is a folder; name the files in it, as in '{path}/*.parquet'")
    suffix = Path(path).suffix.lower()
    kind, module, name = FORMATS.get(suffix, FORMATS[".h5"])
    try:
        if reader is not None:
            Path(path).stat()
            return _numbered(importlib.import_module("apps.formats.own").Own(path, reader), number)
        if suffix not in FORMATS and not _is_hdf5(path):
            raise N3LOError(
                f"{where} is none of what is read: {', '.join(kinds_read())}; data.reader names a "
                "function of yours that reads others"
            )
        source: Source = getattr(importlib.import_module(f"apps.formats.{module}"), name)(path)
    except FileNotFoundError as error:
        raise N3LOError(f"{where} does not exist") from error
    except PermissionError as error:
        raise N3LOError(f"{where} may not be read by you") from error
    except ModuleNotFoundError as error:
        extra = "root" if kind == "ROOT" else "run"
        raise N3LOError(
            f"{where}: {error.name} is not installed in {sys.prefix}: pip install 'n3lo[{extra}]'"
        ) from error
    except (N3LOError, MemoryError):
        raise
    except Exception as error:  # libraries do not say what they raise of a broken file
        raise N3LOError(f"{where} is not a readable {kind} file (truncated?)") from error
    return _numbered(source, number)


def _numbered(source: Source, number: np.generic | None) -> Source:
    source.number = source.number if number is None else number
    return source


def _is_hdf5(path: str) -> bool:
    """By its first bytes, whatever its name."""
    with open(path, "rb") as file:
        return file.read(8) == b"\x89HDF\r\n\x1a\n"


def kinds_read() -> Iterator[str]:
    """ "HDF5 (.h5, .hdf5, .hdf)" and the others."""
    for kind in dict.fromkeys(each for each, _, _ in FORMATS.values()):
        suffixes = [suffix for suffix, (each, _, _) in FORMATS.items() if each == kind]
        yield f"{kind} ({', '.join(suffixes)})"
