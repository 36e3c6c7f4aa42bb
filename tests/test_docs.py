"""What the documents say is so: links lead somewhere, commands exist, blocks run as they stand.

A block with a title is a file of that name. test_readme.py types the README's commands, and
test_first_ten_minutes.py those of its page.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from conftest import ROOT, write_events
from made_runs import Made, make_run

from apps.contract import N3LOError
from sites import get
from workflow import cli
from workflow.ledger import Ledger
from workflow.study import load, parse

DOCS = ROOT / "docs"
OF_ROOT = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]
PAGES = [*OF_ROOT, *sorted(DOCS.rglob("*.md"))]
OF_SITES = [*DOCS.glob("sites/*.md"), DOCS / "sites.md"]  # with sites and studies of their own
WITH_PYTHON = [ROOT / "README.md", *(DOCS / name for name in ("ledger.md", "looking.md"))]
WITH_PYTHON.append(DOCS / "howto/read_ledger.md")
BLOCK = re.compile(
    r"^(?P<indent> *)(?P<fence>```+)(?P<info>[^\n`]*)\n(?P<text>.*?)^(?P=indent)(?P=fence)$",
    re.MULTILINE | re.DOTALL,
)
LINK = re.compile(r"\[(?:[^][]|\[[^]]*\])+\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    where: str  # page:line
    language: str
    title: str  # the file that it is; empty = none
    text: str


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    found = []
    for match in BLOCK.finditer(text):
        language, _, rest = match["info"].partition(" ")
        title = re.search(r'title="([^"]+)"', rest)
        line = text.count("\n", 0, match.start("fence")) + 1
        body = textwrap.dedent(match["text"])
        where = f"{page.relative_to(ROOT)}:{line}"
        found.append(Block(where, language, title[1] if title else "", body))
    return found


def without_blocks(page: Path) -> str:
    return BLOCK.sub("", page.read_text())


def in_language(pages: list[Path], language: str) -> list[Block]:
    return [each for page in pages for each in blocks(page) if each.language == language]


def named(block: Block) -> str:
    return block.where


# -- the site ----------------------------------------------------------------------------------


def test_the_site_is_built_without_a_warning_and_asks_for_nothing_from_a_network(tmp_path):
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    for page in tmp_path.rglob("*.html"):
        loaded = re.findall(r'<(?:script|img)[^>]* src="(\w+:[^"]*)"', page.read_text())
        loaded += re.findall(
            r'<link[^>]* rel="stylesheet"[^>]* href="(\w+:[^"]*)"', page.read_text()
        )
        assert not loaded, page
    # A file of the checkout that a page links to is a page itself.
    assert "DeepSets" in (tmp_path / "tutorial.html").read_text()
    shown = (tmp_path / "checkout/apps/contract.py.html").read_text()
    assert "N3LOError" in shown


def test_the_reference_of_the_command_is_as_the_parsers_have_it():
    """After a change: python docs/reference/write_cli.py"""
    writer = reference_writer()
    if os.environ.get("N3LO_GOLDEN") == "write":
        writer.PAGE.write_text(writer.page())
    assert writer.PAGE.read_text() == writer.page()


def reference_writer():
    spec = importlib.util.spec_from_file_location("write_cli", DOCS / "reference/write_cli.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- links -------------------------------------------------------------------------------------


def slugs(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ +(.+?) *#*$", without_blocks(page), re.MULTILINE):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        number = next(n for n in itertools.count() if (f"{slug}-{n}" if n else slug) not in found)
        found.add(f"{slug}-{number}" if number else slug)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(page):
    for link in LINK.findall(without_blocks(page)):
        if re.match(r"\w+:", link):
            parts = urlsplit(link)
            assert parts.scheme in ("https", "http", "mailto"), link
            assert parts.scheme == "mailto" or "." in parts.netloc, link
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert target.is_relative_to(ROOT), link
        if anchor and target.name != "python.md":  # whose headings are made from the docstrings
            assert anchor in slugs(target), link


# -- commands ----------------------------------------------------------------------------------


def commands(pages: list[Path]) -> list[tuple[str, str]]:
    """Where each command of ours stands, and its line, its comment included."""
    found = []
    for block in in_language(pages, "sh"):
        for line in block.text.replace("\\\n", " ").splitlines():
            ours = re.search(r"(?:^|[ ;&])(?:n3lo|python run_workflow\.py)( .*|)$", line)
            if ours and not re.search(r"\b(git|conda|source) ", line[: ours.start(1)]):
                found.append((block.where, ours[1]))
    for page in pages:
        for code in re.findall(r"`n3lo ([^`\n]+)`", without_blocks(page)):
            if len(code.split()) > 1 and not code.startswith("COMMAND"):
                found.append((str(page.relative_to(ROOT)), f" {code}"))
            elif code.islower():  # its name alone
                assert code in cli.COMMANDS, f"{page}: n3lo {code}"
    return found


def parsed(line: str) -> argparse.Namespace:
    words = shlex.split(re.split(r"[|;&>]", line)[0], comments=True)
    if not words or words[0] not in cli.COMMANDS:
        words.insert(0, "run")
    return cli._parser().parse_args(words)


@pytest.fixture(scope="module")
def options() -> set[str]:
    """All that a command takes."""
    return {
        option
        for _, parser in reference_writer().commands(cli._parser())
        for action in parser._actions
        for option in action.option_strings
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_a_page_is_one_that_the_program_takes(page, options):
    for where, line in commands([page]):
        try:
            given = parsed(line)
        except N3LOError as error:
            pytest.fail(f"{where}: {line.strip()}: {error}")
        for option in re.findall(r"--[a-z-]+", line.partition(" # ")[2]):
            assert option in options or "--backend" in line or "--logdir" in line, (where, option)
        study = getattr(given, "study", None)
        if study is not None and (ROOT / study).is_file() and page not in OF_SITES:
            load(ROOT / study)
            get(getattr(given, "site", "local"), cli._settings(given)) if "set" in given else None


def test_every_option_in_a_text_is_one_of_a_command(options):
    others = {"--with-ft": "mpirun", "--workers": "a benchmark"}
    for page in {*PAGES} - {*OF_SITES, DOCS / "coming_from_nnlo.md", DOCS / "reference/cli.md"}:
        named_here = set(re.findall(r"`(--[a-z][a-z-]*)", without_blocks(page)))
        assert named_here <= options | others.keys(), page


# -- TOML --------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", in_language(PAGES, "toml"), ids=named)
def test_every_toml_block_is_valid_and_every_whole_study_a_study(block, tmp_path):
    content = tomllib.loads(block.text)
    if {"model", "data", "search"} <= content.keys():
        write_events(tmp_path / "events.h5")
        parse(block.text, tmp_path / "study.toml")


# -- blocks that run ---------------------------------------------------------------------------


@pytest.mark.parametrize("block", in_language(PAGES, "python"), ids=named)
def test_every_python_block_compiles(block):
    compile(block.text, block.where, "exec")


def test_the_python_blocks_about_runs_run(tmp_path):
    """One program for all: most of the time is that of the imports."""
    make_run(tmp_path / "runs/jets", Made(name="jets", failed=(1,)))
    make_run(tmp_path / "runs/jets_random", Made(name="jets_random", seed=2))
    program = "".join(
        "names = {}\n"
        + "".join(
            f"exec(compile({each.text!r}, {each.where!r}, 'exec'), names)\n"
            for each in in_language([page], "python")
            if "study.run(" not in each.text  # test_readme.py
        )
        for page in WITH_PYTHON
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], cwd=tmp_path, timeout=100,
        env={**os.environ, "MPLBACKEND": "agg"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.campaign
def test_the_tutorial_runs_as_it_stands(tmp_path):
    for name in ("run_workflow.py", "studies"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
    }
    output = tmp_path / "output.txt"  # not a pipe, which what a kill leaves behind would keep open
    for block in blocks(DOCS / "tutorial.md"):
        if block.title:
            (tmp_path / block.title).write_text(block.text)
        elif block.language in ("sh", "python"):
            shell = ["bash", "-euo", "pipefail", "-c"]
            run = shell if block.language == "sh" else [sys.executable, "-P", "-c"]
            with output.open("a") as out:
                done = subprocess.run(
                    [*run, block.text], cwd=tmp_path, env=environment,
                    stdout=out, stderr=out, timeout=300, check=False,
                )  # fmt: skip
            assert done.returncode == 0, f"{block.where}\n{output.read_text()}"
    said = output.read_text()
    assert said.count("best trial t") >= 3
    assert "output (2000, 5), by t00" in said
    assert "outputs differ by" in said
    lost = Ledger(tmp_path / "runs/first").attempts().query("status == 'lost'")
    assert 2 in set(lost["trial"])  # it was running when the driver was killed
