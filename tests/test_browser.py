"""What people see: the notebook in JupyterLab, the page by Voila, and the report, in a browser."""

from __future__ import annotations

import io
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import MODEL, STUDY, write_events
from made_runs import Made, make_run
from PIL import Image
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

from workflow import Ledger, page
from workflow.figures.style import BLUE
from workflow.view import View

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "notebooks" / "monitor.ipynb"
PATIENCE_MS = 90_000
NUM_TRIALS = 5  # of two folds, one task at a time

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Debian's Chromium, without a window."""
    chromium = shutil.which("chromium")
    assert chromium, "these tests need Chromium: apt-get install chromium"
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        # Root has no sandbox; what it opens here are our own pages.
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def seen(browser) -> Iterator[Page]:
    """An empty page."""
    page = browser.new_page(viewport={"width": 1500, "height": 1300})
    page.set_default_timeout(PATIENCE_MS)
    yield page
    page.close()


@pytest.fixture
def serve(tmp_path) -> Iterator[Callable[..., str]]:
    """Start a server of notebooks that watch `run`, on a port that is free; its address."""
    started = []

    def start(module: str, *options: str, run: Path) -> str:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        own = {"JUPYTER_CONFIG_DIR": str(tmp_path / "jupyter"), "N3LO_WATCH": str(run)}
        command = [sys.executable, "-m", module, "--no-browser", f"--port={port}", *options]
        with open(tmp_path / f"{module}.txt", "w") as log:
            started.append(
                subprocess.Popen(
                    command, cwd=tmp_path, env={**os.environ, **own}, stdout=log, stderr=log
                )
            )
        while not _answers(port):
            assert started[-1].poll() is None, (tmp_path / f"{module}.txt").read_text()
            time.sleep(0.2)
        return f"http://127.0.0.1:{port}"

    yield start
    for process in started:
        process.terminate()
        process.wait(20)


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def driver(tmp_path) -> Iterator[Callable[[], None]]:
    """Start a driver of a small study, whose run folder is runs/small."""
    write_events(tmp_path / "events.h5")
    (tmp_path / "my_model.py").write_text(MODEL)
    study = STUDY.replace("num_trials = 3", f"num_trials = {NUM_TRIALS}")
    (tmp_path / "small.toml").write_text(study)
    started = []

    def start() -> None:
        command = [sys.executable, str(ROOT / "run_workflow.py"), "small.toml", "--set", "cores=1"]
        with open(tmp_path / "driver.txt", "w") as log:
            started.append(subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log))
        ledger = tmp_path / "runs" / "small" / "ledger.jsonl"
        while not ledger.exists():
            assert started[0].poll() is None, (tmp_path / "driver.txt").read_text()
            time.sleep(0.1)

    yield start
    for process in started:
        process.terminate()
        process.wait(60)


def open_tab(page: Page, name: str) -> Locator:
    """Open a tab of the monitor; its first figure."""
    page.get_by_role("tab", name=name, exact=True).click()
    opened = page.locator(".jupyter-widget-tab .lm-mod-current", has_text=name)
    expect(opened).to_be_visible()  # or what is seen would be of the tab before
    return page.locator(".js-plotly-plot:visible .main-svg").first


def wait_for_colour(place: Locator, colour: str) -> None:
    """Until a screenshot of that place has it in some dots, as where data are drawn.

    An opened tab may show what it had when it was closed, until it is drawn again.
    """
    wanted = list(bytes.fromhex(colour.removeprefix("#")))
    end = time.monotonic() + PATIENCE_MS / 1000
    while True:
        picture = Image.open(io.BytesIO(place.screenshot())).convert("RGB")
        if int((np.asarray(picture) == wanted).all(axis=-1).sum()) > 20:
            return
        assert time.monotonic() < end, f"no {colour} in {place}"
        time.sleep(0.2)


def drag(page: Page, place: Locator) -> None:
    """Zoom into the middle of a picture."""
    place.scroll_into_view_if_needed()
    box = place.bounding_box()
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + 0.3 * box["width"], middle)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.6 * box["width"], middle, steps=5)
    page.mouse.up()


def test_the_notebook_in_jupyterlab_follows_a_run_until_its_end(seen, serve, driver, tmp_path):
    shutil.copy(NOTEBOOK, tmp_path)
    run = tmp_path / "runs" / "small"
    options = ("--allow-root", "--ServerApp.ip=127.0.0.1", "--IdentityProvider.token=")
    address = serve("jupyterlab", *options, run=run)
    seen.goto(f"{address}/lab/tree/monitor.ipynb?reset")
    seen.locator(".jp-NotebookPanel .jp-CodeCell").first.click()  # once it is there
    driver()  # not earlier, or the run may be over before the notebook is there
    seen.get_by_role("menuitem", name="Run", exact=True).click()
    seen.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    headline = seen.locator(".n3lo-headline")
    expect(headline).to_contain_text("state: running")
    expect(open_tab(seen, "Overview")).to_be_visible()
    assert (Ledger(run).tasks()["status"] == "done").sum() < 2 * NUM_TRIALS

    open_tab(seen, "Trials")
    done = seen.locator("table.dataTable tbody tr").filter(has_text="done")
    expect(done).to_have_count(NUM_TRIALS)  # one by one, as their tasks end
    expect(headline).to_contain_text(f"tasks: {2 * NUM_TRIALS} done")
    expect(headline).to_contain_text("state: not running")
    for tab in ("Overview", "Search space", "Machine"):
        figure = open_tab(seen, tab)
        expect(figure).to_be_visible()
        wait_for_colour(figure, BLUE)
    expect(open_tab(seen, "Failures")).to_be_visible()
    assert seen.locator("[data-mime-type$='stderr'], [data-mime-type$='error']").count() == 0


def test_the_notebook_is_a_page_by_voila_which_keeps_what_the_user_did(seen, serve, tmp_path):
    """The folder is one of several; another task ends while the picture is zoomed."""
    run = make_run(tmp_path / "runs" / "made", Made(num_trials=9, failed=(2,)))
    rows = (run / "ledger.jsonl").read_text().splitlines(keepends=True)
    (run / "ledger.jsonl").write_text("".join(rows[:-1]))  # the end of the last task
    seen.goto(serve("voila", "--Voila.ip=127.0.0.1", str(NOTEBOOK), run=run.parent))
    headline = seen.locator(".n3lo-headline")
    expect(headline).to_contain_text("23 done")
    figure = seen.locator(".js-plotly-plot").first
    expect(figure.locator(".main-svg").first).to_be_visible()
    drag(seen, figure.locator(".nsewdrag").first)
    zoomed = figure.evaluate("figure => figure.layout.xaxis.range")
    assert zoomed[0] > 1
    assert zoomed[1] < 7
    points = "figure => figure._fullData.reduce((sum, trace) => sum + trace._length, 0)"
    before = figure.evaluate(points)
    with open(run / "ledger.jsonl", "a") as ledger:
        ledger.write(rows[-1])
    expect(headline).to_contain_text("24 done")
    first = "document.querySelector('.js-plotly-plot')"
    seen.wait_for_function(f"before => ({points})({first}) > before", arg=before)
    assert figure.evaluate("figure => figure.layout.xaxis.range") == zoomed
    for tab in ("Overview", "Search space", "Machine", "Failures"):
        expect(open_tab(seen, tab)).to_be_visible()
        # All of them, also one of no height at all, which is not "visible".
        seen.wait_for_function(
            "[...document.querySelectorAll('.js-plotly-plot')].filter(each => each.offsetParent)"
            ".every(each => each.getBoundingClientRect().height > 200)"
        )


@pytest.mark.parametrize("finished", [True, False], ids=["a-run", "nothing-finished"])
def test_the_report_opens_from_disk_without_a_network(browser, tmp_path, finished):
    running = () if finished else (0, 1, 2)
    made = Made(num_trials=12 if finished else 3, failed=(4,), running=running)
    path = tmp_path / "report.html"
    page.write_page(View(make_run(tmp_path / "run", made)), path)
    asked, said = [], []
    context = browser.new_context(offline=True)
    opened = context.new_page()
    opened.on("request", lambda request: asked.append(request.url))
    opened.on("console", lambda line: said.append(line.text) if line.type == "error" else None)
    opened.on("pageerror", lambda error: said.append(str(error)))
    opened.goto(path.as_uri())
    plots = opened.locator(".js-plotly-plot")
    expect(plots.last.locator(".main-svg").first).to_be_visible()
    assert plots.count() >= 9
    assert opened.locator(".js-plotly-plot:not(:has(.main-svg))").count() == 0
    outside = [url for url in asked if not url.startswith(("file:", "data:", "blob:"))]
    assert (outside, said) == ([], [])
    context.close()


def test_a_table_of_the_report_is_sorted_by_a_click(browser, tmp_path):
    path = tmp_path / "report.html"
    view = View(make_run(tmp_path / "run", Made(num_trials=12, failed=(4,))))
    page.write_page(view, path)
    opened = browser.new_page()
    opened.goto(path.as_uri())
    table = opened.locator("table").last
    place = table.locator("th").all_inner_texts().index("score")
    scores = sorted(view.best_first["score"])
    for wanted in (scores, scores[::-1]):
        table.locator("th").nth(place).click()
        cells = table.locator(f"tbody tr td:nth-child({place + 1})")
        values = [cell.get_attribute("data-value") for cell in cells.all()]
        assert [float(value) for value in values[:-1]] == wanted
        assert values[-1] is None  # what failed has none, and comes last
    opened.close()


def test_the_notebook_runs_from_its_first_cell_to_its_last(tmp_path):
    """Of a finished run, by nbclient: no cell fails, and the tables are those of the ledger."""
    import nbformat
    from nbclient import NotebookClient

    run = make_run(tmp_path / "run", Made(num_trials=6, failed=(2,)))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(ROOT)}})
    os.environ["N3LO_WATCH"] = str(run)
    try:
        done = client.execute()
    finally:
        del os.environ["N3LO_WATCH"]
    outputs = [output for cell in done.cells for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output["output_type"] in ("error", "stream")]
    assert "application/vnd.jupyter.widget-view+json" in json.dumps(outputs)
    best = View(run).best_first["score"].iloc[0]
    assert f"{best:.6f}" in json.dumps(outputs)
