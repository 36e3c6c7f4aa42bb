"""The pages of docs/sites: one for each site, whose commands, settings and launch lines are true.

What a page shows of a plan follows from its own commands and files. After a change that is meant:

    N3LO_GOLDEN=write pytest tests/test_site_pages.py
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

import sites
from sites.base import Site
from sites.launchers import Shape
from sites.settings import settings_of
from workflow import cli, plan
from workflow.runfolder import flat
from workflow.study import StudyFile, load

PAGES = ROOT / "docs/sites"
YOUR_OWN = "your_own"
NAMES = sorted(path.stem for path in PAGES.glob("*.md"))
MODEL = ROOT / "studies/jets.toml"  # of which the pages change some lines
OF_FILES = re.compile(r"#\w+ (--output|--error|--job-name|-[oeJ] )")  # of no interest in a page
JOB = {  # for `inside`
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_NODELIST": "n[1-4]",
    "SLURM_JOB_CPUS_PER_NODE": "32(x4)",
    "SLURM_GPUS_ON_NODE": "4",
    "SLURM_JOB_END_TIME": "4102444800",
}


def blocks(name: str, language: str) -> list[str]:
    """The fenced blocks of a page that are in a language."""
    text = (PAGES / f"{name}.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def tables(name: str) -> list[tuple[str, dict[str, Any]]]:
    """The TOML blocks of a page, and what is in them."""
    return [(text, tomllib.loads(text)) for text in blocks(name, "toml")]


def commands(name: str) -> list[list[str]]:
    """The words of each command of ours on a page."""
    lines = "".join(blocks(name, "sh")).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True)[2:] for line in lines if is_ours(line)]


def is_ours(line: str) -> bool:
    return line.startswith("python run_workflow.py")


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The user's for sites.toml, on a host that is in a job of Slurm."""
    home = tmp_path / "home"
    (home / ".config/n3lo").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "scontrol").write_text("#!/bin/sh\nprintf 'n%s\\n' 1 2 3 4\n")
    (programs / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    for key, value in JOB.items():
        monkeypatch.setenv(key, value)
    return home / ".config/n3lo"


@pytest.fixture
def parsed(folder) -> Callable[[str], list[argparse.Namespace]]:
    """The commands of a page as the program has them, with the page's sites.toml in its place."""

    def parse(name: str) -> list[argparse.Namespace]:
        own = [text for text, content in tables(name) if "name" not in content]
        (folder / "sites.toml").write_text("\n".join(own))
        given = []
        for words in commands(name):
            has_command = words[0] in cli.COMMANDS
            given.append(cli._parser().parse_args(words if has_command else ["run", *words]))
        return given

    return parse


def study_of(name: str, options: argparse.Namespace) -> StudyFile:
    """The study of a command, which may be the page's own: some lines of the shipped one changed.

    A TOML block with a name is a study, all others are a sites.toml.
    """
    changed = {content["name"]: content for _, content in tables(name) if "name" in content}
    values = dict(flat(changed.get(options.study.stem, {})))
    assert values or (ROOT / options.study).exists(), options.study
    return load(MODEL if values else ROOT / options.study, values)


def site_of(options: argparse.Namespace) -> Site:
    return sites.get(options.site, cli._settings(options), cli._site_folders(options))


def test_each_site_has_a_page_and_each_page_a_site():
    assert {*NAMES} == {*sites.SITES, YOUR_OWN}


def test_the_overview_links_each_page():
    links = re.findall(r"\(sites/(\w+)\.md[#)]", (ROOT / "docs/sites.md").read_text())
    assert {*links} == {*NAMES}


@pytest.mark.parametrize("name", [*NAMES, "../sites"])
def test_links_lead_somewhere(name):
    path = PAGES / f"{name}.md"
    for link in re.findall(r"\]\(([^)]+)\)", path.read_text()):
        target, _, heading = link.partition("#")
        if target.startswith("http"):
            continue
        to = (path.parent / target).resolve() if target else path
        assert to.exists(), link
        headings = re.findall(r"^#+ (.*)$", to.read_text(), re.MULTILINE) if heading else []
        known = [re.sub(r"[^\w -]", "", text).lower().replace(" ", "-") for text in headings]
        assert not heading or heading in known, link


@pytest.mark.parametrize("name", NAMES)
def test_commands_are_accepted_with_their_settings_and_their_studies(name, parsed):
    seen = set()
    for options in parsed(name):
        if not hasattr(options, "site"):
            continue
        seen.add(options.site)
        if hasattr(options, "trials"):  # run, plan, rerun
            site = site_of(options)
            assert site.num_slots(plan.largest_shape(study_of(name, options))) > 0
        else:  # sites show, sites check
            site_class, given = sites.find(options.site, cli._site_folders(options))
            settings_of(site_class, given)
    assert name == YOUR_OWN or name in seen


@pytest.mark.parametrize("name", NAMES)
def test_files_on_a_page_are_read_whole(name, parsed):
    parsed(name)
    read = cli._site_folders(argparse.Namespace(study=Path("study.toml")))
    for text, content in tables(name):
        for site in content if "name" not in content else ():
            site_class, given = sites.find(site, read)
            assert settings_of(site_class, given), text


def shown(site: Site, study: StudyFile, run_dir: Path) -> str:
    """What a page shows of a plan: a launch line, and the head of a pilot's batch script."""
    line = shlex.join(site.command(plan.shape_of(study.study.training, study.study.layout)))
    text = f"{line} .../python -P -m apps.train .../t000-f0/task.json\n"
    pilots = site.pilots_of(plan.smallest_shape(study), run_dir)
    if pilots is None:
        return text
    head = [
        each for each in pilots.script.splitlines() if re.match(r"#(SBATCH|BSUB|PBS|COB)", each)
    ]
    kept = [each for each in head if not OF_FILES.match(each)]
    return re.sub(r"n3lo-\w+", "n3lo-...", "\n".join([text, "#!/bin/bash", *kept, ""]))


@pytest.mark.parametrize("name", [name for name in NAMES if name != YOUR_OWN])
def test_the_launch_line_and_the_batch_script_are_those_of_the_plan(name, parsed, tmp_path):
    first = next(each for each in parsed(name) if hasattr(each, "site") and hasattr(each, "trials"))
    text = shown(site_of(first), study_of(name, first), tmp_path / "runs/study/parsl")
    if os.environ.get("N3LO_GOLDEN") == "write":
        path = PAGES / f"{name}.md"
        before, _, after = path.read_text().partition("```text\n")
        rest = after.partition("```\n")[2]
        path.write_text(f"{before}```text\n{text}```\n{rest}")
    [written] = blocks(name, "text")
    assert written == text


def test_a_class_of_your_own_is_a_site(tmp_path, monkeypatch, parsed):
    [source] = blocks(YOUR_OWN, "python")
    (tmp_path / "mine.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sites.SITES, "mine", "mine:Mine")
    monkeypatch.setattr(sites.settings, "user_folder", lambda: tmp_path)
    site = sites.get("mine", {"nodes": "2", "walltime_min": "60", "account": "hep101"})
    command = site.command(Shape(num_ranks=8, cores_per_rank=16, gpus_per_rank=1))
    assert command[:2] == ["srun", "--exact"]
    assert {"--nodes=2", "--ntasks-per-node=4", "--gres=gpu:4"} <= {*command}
