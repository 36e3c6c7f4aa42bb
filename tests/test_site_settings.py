"""What a site is told by the command line and by files: whose word counts, and each mistake."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest

import sites
from sites.base import SiteError
from sites.launchers import Shape
from sites.local import Local
from sites.settings import KINDS, Given, build, said_by_user, settings_of, user_folder
from sites.slurm import Slurm

MINE = """\
[mine]
like = "slurm"
summary = "The group's: 64 cores and 4 A100 a node."
nodes = 2
walltime_min = 120
cores_per_node = 64
gpus_per_node = 4
mpi = ""
"""


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """The study's, and the user's."""
    found = [tmp_path / "study", tmp_path / "user"]
    for folder in found:
        folder.mkdir()
    return found


def write(folder: Path, text: str) -> Path:
    path = folder / "sites.toml"
    path.write_text(text)
    return path


def error_of(name: str, folders: list[Path], **settings: str) -> str:
    """One line."""
    with pytest.raises(SiteError) as caught:
        sites.get(name, settings, folders)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# -- whose word counts -----------------------------------------------------------------------


def test_the_command_line_comes_before_the_study_s_file_and_that_before_the_user_s(folders):
    write(folders[0], "[slurm]\nnodes = 2\nwalltime_min = 20\n")
    write(folders[1], "[slurm]\nnodes = 3\nwalltime_min = 30\ncores_per_node = 32\n")
    site = sites.get("slurm", {"nodes": "1"}, folders)
    assert isinstance(site, Slurm)
    assert (site.nodes, site.walltime_min, site.cores_per_node, site.pilots) == (1, 20, 32, 1)


def test_files_need_not_be_there(folders):
    assert sites.get("local", {"cores": "3"}, [*folders, Path("/nowhere")]) == Local(cores=3)


def test_tables_of_other_sites_do_not_matter(folders):
    write(folders[0], "[slurm]\nnoodles = 2\n[other]\n")
    assert sites.get("local", {}, folders) == Local()


def test_the_user_s_file_is_in_the_folder_for_configurations(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert user_folder() == tmp_path / "n3lo"
    monkeypatch.setenv("XDG_CONFIG_HOME", "")
    monkeypatch.setenv("HOME", "/home/ada")
    assert user_folder() == Path("/home/ada/.config/n3lo")


def test_an_empty_text_is_none_at_all_where_there_may_be_none(folders):
    path = write(folders[1], '[slurm]\nnodes = 1\nwalltime_min = 9\ncores_per_node = 2\nmpi = ""\n')
    site = sites.get("slurm", {"memory_gb_per_node": "", "setup": ""}, folders)
    assert isinstance(site, Slurm)
    assert (site.mpi, site.memory_gb_per_node, site.setup) == (None, None, "")
    assert error_of("slurm", folders, nodes="") == "--set nodes=: '' is not a whole number"
    path.write_text(path.read_text().replace("nodes = 1", 'nodes = ""'))
    assert error_of("slurm", folders) == f'{path}:2: [slurm] nodes = "" is not a whole number'


@dataclass(frozen=True, kw_only=True)
class Odd(Local):
    """A site with settings of all kinds."""

    name = "odd"

    exclusive: Annotated[bool, "whether nobody else may be there"] = False
    hours: Annotated[float, "of waiting"] = 1.0


def test_texts_become_what_they_say():
    site = build(Odd, said_by_user({"exclusive": "false", "hours": "0.5"}))
    assert site == Odd(exclusive=False, hours=0.5)
    assert build(Odd, said_by_user({"exclusive": "true"})) == Odd(exclusive=True)
    whole = Given(value=2, origin="sites.toml:2", key="sites.toml:2: [odd] hours")
    assert build(Odd, {"hours": whole}) == Odd(hours=2.0)
    with pytest.raises(SiteError) as caught:
        build(Odd, said_by_user({"exclusive": "no"}))
    assert str(caught.value) == "--set exclusive=no: 'no' is not true or false"


# -- a site of the user's own ----------------------------------------------------------------


def test_a_site_of_the_user_s_own_is_like_another_with_its_own_values(folders):
    write(folders[1], MINE)
    site = sites.get("mine", {"nodes": "3"}, folders)
    assert isinstance(site, Slurm)
    assert (site.name, site.nodes, site.gpus_per_node, site.mpi) == ("mine", 3, 4, None)
    assert site.command(Shape(num_ranks=4, gpus_per_rank=1))[:3] == ["srun", "--exact", "--nodes=1"]
    assert sites.names(folders) == [*sites.SITES, "mine"]
    assert Slurm.name == "slurm"


def test_a_site_of_the_user_s_own_may_stand_in_both_files(folders):
    write(folders[0], "[mine]\nwalltime_min = 10\n")
    write(folders[1], MINE)
    site = sites.get("mine", {}, folders)
    assert isinstance(site, Slurm)
    assert (site.walltime_min, site.nodes) == (10, 2)


def test_messages_name_a_site_of_the_user_s_own_as_the_user_does(folders):
    path = write(folders[1], MINE.replace("nodes = 2\n", ""))
    assert error_of("mine", folders).startswith("site 'mine' needs nodes: add --set nodes=..., or")
    path.write_text(MINE.replace("nodes = 2", "nods = 2"))
    assert error_of("mine", folders) == (
        f"{path}:4: [mine] nods: site 'mine' has no such setting; did you mean 'nodes'?"
    )
    assert error_of("mines", folders) == "--site mines: no such site; did you mean 'mine'?"


def test_a_site_of_the_user_s_own_has_to_say_what_it_is_like(folders):
    path = write(folders[1], '[perlmuter]\naccount = "m1234"\n')
    assert error_of("perlmuter", folders) == (
        f"{path}:2: [perlmuter]: no such site; did you mean 'perlmutter'?; a site of your own says "
        'which of those here it is like: like = "slurm"'
    )
    path.write_text('[mine]\nlike = "slrum"\n')
    assert error_of("mine", folders) == (
        f"{path}:2: [mine] like = \"slrum\": no such site; did you mean 'slurm'?"
    )
    path.write_text("[mine]\nlike = 4\n")
    assert error_of("mine", folders) == (
        f"{path}:2: [mine] like = 4 is not a text; put it in quotes"
    )
    path.write_text('["a/b"]\nlike = "slurm"\n')
    assert error_of("a/b", folders) == (
        f"{path}:2: [a/b]: the name of a site has only letters, digits, '_' and '-'"
    )


# -- mistakes --------------------------------------------------------------------------------


def test_missing_settings_are_asked_for_in_both_forms(folders, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert error_of("perlmutter", folders, nodes="4") == (
        "site 'perlmutter' needs walltime_min, account: add --set walltime_min=... --set "
        'account=..., or walltime_min = ..., account = "..." below [perlmutter] in '
        f"{tmp_path}/n3lo/sites.toml"
    )


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("core = 4", "core: site 'local' has no such setting; did you mean 'cores'?"),
        ("cores = 'many'", 'cores = "many" is not a whole number'),
        ("cores = '4'", 'cores = "4" is not a whole number; leave out the quotes'),
        ("cores = 1.5", "cores = 1.5 is not a whole number"),
        ("cores = true", "cores = true is not a whole number"),
        ("cores = 07:00:00", 'cores = "07:00:00" is not a whole number'),
        ("cores = 0", "cores = 0: it must be at least 1"),
        ("gpus = -1", "gpus = -1: it must be at least 0"),
    ],
)
def test_a_mistake_in_a_file_is_named_with_its_line(folders, line, said):
    path = write(folders[0], f"# mine\n[slurm]\ncores = 4\n\n[local]\ntasks_per_gpu = 2\n{line}\n")
    assert error_of("local", folders) == f"{path}:7: [local] {said}"


def test_a_number_for_a_text_is_told_about_quotes(folders):
    path = write(folders[0], "[slurm]\naccount = 1234\n")
    assert error_of("slurm", folders) == (
        f"{path}:2: [slurm] account = 1234 is not a text; put it in quotes"
    )


def test_a_key_without_a_line_of_its_own_is_named_with_its_file(folders):
    path = write(folders[0], "local = { cores = 0 }\n")
    assert error_of("local", folders) == f"{path}: [local] cores = 0: it must be at least 1"


def test_what_is_no_table_of_a_site_is_told_where_to_go(folders):
    path = write(folders[0], '\naccount = "hep101"\n')
    assert error_of("local", folders) == (
        f"{path}:2: account: write it below the name of its site, as [NAME]"
    )


def test_a_file_that_cannot_be_read_is_named(folders):
    path = write(folders[1], "[local]\ncores = \n")
    assert error_of("local", folders) == (
        f"{path}: not valid TOML: Invalid value (at line 2, column 9)"
    )
    path.write_bytes(b"\xff")
    assert error_of("local", folders).startswith(f"{path}: not valid TOML: 'utf-8' codec can't")
    path.unlink()
    path.mkdir()
    assert error_of("local", folders) == f"{path}: it cannot be read: Is a directory"


# -- every site ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sites.SITES)
def test_a_site_says_in_a_line_what_it_is_and_what_each_setting_means(name):
    site, _ = sites.find(name)
    assert site.name == name
    assert site.__doc__
    assert site.__doc__.partition("\n")[0].endswith(".")
    assert site.programs
    for setting in settings_of(site, {}):
        assert setting.meaning, setting
        assert setting.kind in KINDS, setting
