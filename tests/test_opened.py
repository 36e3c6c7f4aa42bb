"""Files that a user's code reads are heard of; so a change of them cannot go unnoticed."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import numpy as np

from apps.opened import files_read


def test_files_that_are_read_are_found_by_whatever_function_and_others_are_not(tmp_path):
    config, table, weights = (tmp_path / name for name in ("a.json", "b.toml", "c.npy"))
    config.write_text("{}")
    table.write_text("")
    np.save(weights, np.zeros(3))
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "kept").write_text("")
    (tmp_path / "mine.egg-info").mkdir()  # of a package that is installed from a checkout
    (tmp_path / "mine.egg-info" / "entry_points.txt").write_text("")
    with files_read() as read:
        json.loads(config.read_text())
        with table.open("rb") as file:
            tomllib.load(file)
        np.load(str(weights))
        (tmp_path / ".cache" / "kept").read_text()
        (tmp_path / "mine.egg-info" / "entry_points.txt").read_text()
        (tmp_path / "written.txt").write_text("")
        (tmp_path / "absent.txt").exists()
        import tabnanny  # noqa: F401 - code has its own way into the key
    assert read == {config, table, weights}
    (tmp_path / "later.txt").write_text("")
    Path(tmp_path / "later.txt").read_text()
    assert read == {config, table, weights}
