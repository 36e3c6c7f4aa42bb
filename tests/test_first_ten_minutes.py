"""docs/first_ten_minutes.md as it stands: from an empty folder, only what is written there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from workflow import Ledger

pytestmark = pytest.mark.campaign

PAGE = (ROOT / "docs" / "first_ten_minutes.md").read_text()
SECTIONS = {
    title: text
    for title, text in re.findall(r"^## (\d+\. [^\n]*)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
}
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.M | re.S)
OF_ONE_EPOCH = {"4. NNLO's jets: JEDI-net"}  # which are not enough to learn


def do(folder: Path, text: str) -> None:
    """Write the files of a section, and type its commands."""
    environment = {
        **os.environ,
        "N3LO": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "XDG_CONFIG_HOME": str(folder / "config"),
    }
    for language, name, block in BLOCK.findall(text):
        if name:
            (folder / name).write_text(block)
            continue
        assert language == "sh", f"a block of {language} without a title: what is it for?"
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block],
            cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr


def test_there_are_the_eleven_that_the_readme_promises():
    assert len(SECTIONS) == 11


@pytest.mark.parametrize("title", SECTIONS)
def test_a_beginner_comes_to_a_finished_search(title, tmp_path):
    do(tmp_path, SECTIONS[title])
    [run] = [path.parent for path in tmp_path.glob("runs/*/ledger.jsonl")]
    ledger = Ledger(run)
    assert set(ledger.tasks()["status"]) == {"done"}
    if title in OF_ONE_EPOCH:
        return
    learned = []
    for task in ledger.tasks()["folder"]:
        losses = ledger.history(*map(int, re.findall(r"\d+", task)))["val_loss"]
        learned.append(losses.min() < losses.iloc[0])
    assert any(learned)
