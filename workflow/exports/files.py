"""The tables of the ledger as files: CSV, Parquet, HDF5, SQLite."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pandas as pd

from apps.contract import N3LOError
from workflow.ledger import Ledger
from workflow.tables import TABLES
from workflow.whole import DATABASES, check_file, whole_database, whole_file

HDF5 = (".h5", ".hdf5")
ENDINGS = (".csv", ".parquet", *HDF5, *DATABASES)

_EPOCH = pd.Timestamp(0, tz="UTC")
_TIME = ", in seconds since 1970-01-01 UTC"


def write_tables(ledger: Ledger, path: Path, table: str | None = None) -> None:
    """Write tables to a file, of the kind that its ending says; whole or not at all.

    Args:
        table: this one alone. By default HDF5 and SQLite files have all, and others the tasks.

    Raises:
        N3LOError: there is no such ending, or the file cannot be replaced.
    """
    if path.suffix not in ENDINGS:
        raise N3LOError(
            f"export to '{path}': the file must end in {', '.join(ENDINGS)}; for other programs "
            f"there is --as optuna, mlflow or tensorboard"
        )
    check_file(path)
    holds_all = path.suffix in (*HDF5, *DATABASES)
    names = list(TABLES) if holds_all and table is None else [table or "tasks"]
    frames = {name: _frame(ledger, name) for name in names}
    if path.suffix in DATABASES:
        _write_sqlite(path, frames)
    elif path.suffix in HDF5:
        _write_hdf5(path, frames)
    else:
        [frame] = frames.values()
        with whole_file(path) as beside:
            if path.suffix == ".csv":
                frame.to_csv(beside, index=False)
            else:
                frame.to_parquet(beside)


def _frame(ledger: Ledger, name: str) -> pd.DataFrame:
    """A table, in which choices of several types are text."""
    frame: pd.DataFrame = getattr(ledger, name)()
    mixed = frame.select_dtypes("object").columns
    return frame.astype(dict.fromkeys(mixed, "string"))


# -- SQLite ----------------------------------------------------------------------------------------


def _write_sqlite(path: Path, frames: dict[str, pd.DataFrame]) -> None:
    with whole_database(path) as built, closing(sqlite3.connect(built)) as connection:
        for name, frame in frames.items():
            plain = pd.DataFrame({each: _for_sqlite(values) for each, values in frame.items()})
            try:
                plain.to_sql(name, connection, index=False)
            except sqlite3.OperationalError as error:  # names that differ in capitals, too many
                raise N3LOError(f"export to '{path}': SQLite: {error}; take .h5") from None


def _for_sqlite(column: pd.Series[Any]) -> pd.Series[Any]:
    """Of the types that SQLite knows: times as ISO 8601, truth as 0 and 1."""
    if isinstance(column.dtype, pd.DatetimeTZDtype):
        texts: pd.Series[Any] = column.dt.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        return texts
    return column.astype("Int64") if column.dtype == "boolean" else column


# -- HDF5 ------------------------------------------------------------------------------------------


def _write_hdf5(path: Path, frames: dict[str, pd.DataFrame]) -> None:
    """A group for each table with a dataset for each column, of shape (rows,).

    What is missing is NaN, and "" in texts; so whole numbers of which some are missing are floats.
    """
    try:
        import h5py
    except ModuleNotFoundError:  # it comes with what trains, of which a look needs nothing else
        raise N3LOError(f"export to '{path}': HDF5 needs h5py: pip install h5py") from None
    with whole_file(path) as beside, h5py.File(beside, "w") as file:
        for name, frame in frames.items():
            group = file.create_group(name, track_order=True)  # as the columns are
            columns = {column.name: column for column in TABLES[name]}
            for heading, values in frame.items():
                dataset = group.create_dataset(str(heading), **_for_hdf5(values, h5py))
                if (known := columns.get(str(heading))) is not None:
                    is_time = isinstance(values.dtype, pd.DatetimeTZDtype)
                    dataset.attrs["unit"] = "s" if is_time else known.unit  # "" of none
                    dataset.attrs["meaning"] = known.meaning + _TIME * is_time


def _for_hdf5(column: pd.Series[Any], h5py: Any) -> dict[str, Any]:
    if isinstance(column.dtype, pd.StringDtype):
        texts = column.fillna("").str.replace("\0", "")  # HDF5 ends a text there
        return {"data": texts.to_numpy(dtype=object), "dtype": h5py.string_dtype()}
    if isinstance(column.dtype, pd.DatetimeTZDtype):
        return {"data": (column - _EPOCH).dt.total_seconds().to_numpy()}
    if column.hasnans:
        return {"data": column.to_numpy(dtype="float64", na_value=float("nan"))}
    return {"data": column.to_numpy(dtype=str(column.dtype).lower().replace("boolean", "bool"))}
