"""Take the pictures of this folder anew, in Debian's Chromium.

    python docs/pictures/take.py runs/jets          # while the study runs, for a live notebook

Writes notebook.png and report.png.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from workflow import page
from workflow.view import View

HERE = Path(__file__).resolve().parent
NOTEBOOK = HERE.parent.parent / "notebooks" / "monitor.ipynb"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    options = parser.parse_args()
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as temporary:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        take_notebook(browser, options.run.resolve(), Path(temporary))
        take_report(browser, options.run, Path(temporary))


def take_notebook(browser: Browser, run: Path, folder: Path) -> None:
    """The overview in JupyterLab, as after "Run All Cells"."""
    shutil.copy(NOTEBOOK, folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    lab = subprocess.Popen(
        [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}",
         "--ServerApp.ip=127.0.0.1", "--IdentityProvider.token="],
        cwd=folder,
        env={**os.environ, "N3LO_WATCH": str(run), "JUPYTER_CONFIG_DIR": str(folder)},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        shown = browser.new_page(viewport={"width": 1400, "height": 1250})
        shown.set_default_timeout(120_000)
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.2)
        shown.goto(f"http://127.0.0.1:{port}/lab/tree/monitor.ipynb?reset")
        shown.locator(".jp-NotebookPanel .jp-CodeCell").first.click()
        shown.keyboard.press("Control+b")  # no side bar
        shown.get_by_role("menuitem", name="Run", exact=True).click()
        shown.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        shown.locator(".js-plotly-plot .main-svg").first.wait_for()
        shown.get_by_role("button", name="No", exact=True).click()  # news of Jupyter
        shown.locator(".jp-OutputArea").first.evaluate("output => output.scrollIntoView()")
        shown.wait_for_timeout(4000)
        shown.screenshot(path=HERE / "notebook.png")
    finally:
        lab.terminate()
        lab.wait()


def take_report(browser: Browser, run: Path, folder: Path) -> None:
    """What the report begins with."""
    page.write_page(View(run), folder / "report.html")
    shown = browser.new_page(viewport={"width": 1200, "height": 1500})
    shown.goto((folder / "report.html").as_uri())
    shown.locator(".js-plotly-plot .main-svg").last.wait_for()
    shown.wait_for_timeout(1000)
    shown.screenshot(path=HERE / "report.png")


if __name__ == "__main__":
    main()
