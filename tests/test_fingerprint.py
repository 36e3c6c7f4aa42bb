"""What a result depends on, and how an edit of it is noticed."""

from __future__ import annotations

import os
import sys

import pytest
from conftest import ROOT
from test_architecture import imported

from apps.check import check
from apps.contract import Fingerprint, N3LOError
from workflow import fingerprint as module
from workflow.fingerprint import fingerprint
from workflow.plan import Planner
from workflow.study import load


@pytest.fixture
def digest(study_path, tmp_path):
    def digest():
        file = load(study_path)
        return fingerprint(file, file.data_files(), tmp_path / "memo.json")

    return digest


def test_the_same_study_has_the_same_fingerprint(digest):
    assert digest() == digest()


def test_a_changed_line_of_the_model_is_noticed(digest, study_path):
    before = digest()
    model = study_path.with_name("my_model.py")
    model.write_text(model.read_text().replace("ReLU", "SELU"))
    after = digest()
    assert after.model != before.model
    assert (after.data, after.code) == (before.data, before.code)


def test_a_changed_file_that_a_search_may_choose_is_noticed(digest, study_path, edit):
    other = study_path.with_name("other.py")
    other.write_text(study_path.with_name("my_model.py").read_text())
    choice = (
        '"model.source" = { type = "choice", values = ["my_model.py:Tagger", "other.py:Tagger"] }'
    )
    edit("[search.space]", f"[search.space]\n{choice}")
    before = digest()
    other.write_text(other.read_text().replace("ReLU", "SELU"))
    assert digest().model != before.model


def test_a_changed_file_that_the_model_reads_is_noticed_where_the_study_names_it(
    digest, study_path, edit
):
    config = study_path.with_name("config.json")
    config.write_text('{"hidden": 16}')
    edit("[data]", 'files = ["conf*.json"]\n\n[data]')
    before = digest()
    config.write_text('{"hidden": 64}')
    assert digest().model != before.model
    edit("conf*.json", "other.json")
    with pytest.raises(
        N3LOError, match=r"small.toml:8: model.files: there is no file 'other.json'"
    ):
        digest()


def test_a_file_that_the_model_reads_and_the_study_does_not_name_is_warned_of(study_path, edit):
    config = study_path.with_name("config.json")
    config.write_text('{"hidden": 16}')
    model = study_path.with_name("my_model.py")
    model.write_text(
        "import pathlib\npathlib.Path(__file__).with_name('config.json').read_text()\n"
        + model.read_text()
    )

    def warnings() -> list[str]:
        file = load(study_path)
        files = file.data_files()
        planner = Planner(file, files, Fingerprint(data="d", model="m", code="c"))
        return check(planner.base_task())["warnings"]

    [warning] = warnings()
    assert f"the model's code reads {config}; name it in model.files" in warning
    edit("[data]", 'files = ["config.json"]\n\n[data]')
    assert warnings() == []


def test_a_file_that_appears_while_a_study_runs_changes_no_task(study_path, edit):
    edit('files = ["events.h5"]', 'files = ["*.h5"]')
    edit('inputs = "x"', 'inputs = { x = "x", which = "@file" }')
    file = load(study_path)
    planner = Planner(file, file.data_files(), Fingerprint(data="d", model="m", code="c"))
    before = planner.base_task()
    study_path.with_name("more.h5").write_bytes(study_path.with_name("events.h5").read_bytes())
    assert planner.base_task() == before
    assert before.data.file_numbers == [0]


PACKAGE = {
    "__init__.py": "",
    "net.py": "from .layers import make\n\n\ndef Net(width=4):\n    return make(width)\n",
    "layers.py": "from torch.nn import Linear\n\n\ndef make(width):\n    return Linear(3, 2)\n",
}


@pytest.fixture(params=["{}/net.py:Net", "{}.net:Net"], ids=["by file", "by name"])
def package(request, study_path, edit):
    """A package beside the study, whose modules import each other by `from .other`."""
    folder = study_path.with_name(f"of_{study_path.parent.name}")  # each is imported here
    folder.mkdir()
    for name, text in PACKAGE.items():
        (folder / name).write_text(text)
    edit("my_model.py:Tagger", request.param.format(folder.name))
    return folder


def test_a_package_beside_the_study_is_imported_as_one(package, study_path):
    file = load(study_path)
    task = Planner(file, file.data_files(), Fingerprint(data="d", model="m", code="c")).base_task()
    assert task.model.source == f"{package / 'net.py'}:Net"
    assert check(task)["num_parameters"] == 8


def test_a_file_of_its_own_folder_comes_before_one_of_the_packages_folder(
    package, study_path, digest
):
    (package / "helper.py").write_text("WIDTH = 3\n")
    (study_path.with_name("helper.py")).write_text("WIDTH = 300\n")
    (package / "net.py").write_text(
        "from helper import WIDTH\nfrom torch.nn import Linear\n\n\n"
        "def Net(width=4):\n    return Linear(WIDTH, 2)\n"
    )
    before = digest()
    file = load(study_path)
    task = Planner(file, file.data_files(), Fingerprint(data="d", model="m", code="c")).base_task()
    assert check(task)["num_parameters"] == 8
    (package / "helper.py").write_text("WIDTH = 3  # of x\n")
    assert digest() != before


def test_a_package_itself_may_hold_the_model_and_is_imported_once(study_path, edit, capsys):
    folder = study_path.with_name(f"whole_{study_path.parent.name}")
    folder.mkdir()
    (folder / "__init__.py").write_text("print('imported')\n" + PACKAGE["layers.py"])
    edit("my_model.py:Tagger", f"{folder.name}:make")
    file = load(study_path)
    task = Planner(file, file.data_files(), Fingerprint(data="d", model="m", code="c")).base_task()
    assert check(task)["num_parameters"] == 8
    assert capsys.readouterr().out.count("imported") == 1


@pytest.mark.parametrize("name", PACKAGE)
def test_a_changed_file_of_a_package_is_noticed(package, digest, name):
    before = digest()
    (package / name).write_text(PACKAGE[name] + "# more\n")
    assert digest().model != before.model


@pytest.mark.parametrize("key", ["reader", "collate"])
def test_a_changed_function_on_the_data_is_noticed(digest, study_path, edit, key):
    edit("[data]", f'[data]\n{key} = "mine.py:function"')
    mine = study_path.with_name("mine.py")
    mine.write_text("def function(given):\n    return given\n")
    before = digest()
    mine.write_text("def function(given):\n    return 2 * given\n")
    assert digest().model != before.model


def test_a_changed_file_that_the_model_imports_is_noticed(digest, study_path):
    model = study_path.with_name("my_model.py")
    layers = study_path.with_name("my_layers.py")
    model.write_text("from my_layers import Block\n" + model.read_text())
    layers.write_text("import my_numbers\nclass Block: pass\n")
    numbers = study_path.with_name("my_numbers.py")
    numbers.write_text("N = 1\n")
    before = digest()
    numbers.write_text("N = 2\n")
    assert digest().model != before.model


@pytest.mark.parametrize("edited", ["__init__.py", "a.py", "b.py", "deep/c.py"])
def test_a_changed_file_of_a_package_that_the_model_imports_is_noticed(digest, study_path, edited):
    package = study_path.parent / "mylib"
    (package / "deep").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "a.py").write_text("from mylib.b import W\nfrom .deep import c\n")
    (package / "b.py").write_text("W = 1\n")
    (package / "deep" / "c.py").write_text("from ..b import W\n")
    model = study_path.with_name("my_model.py")
    model.write_text("from mylib.a import W\n" + model.read_text())
    before = digest()
    with open(package / edited, "a") as file:
        file.write("X = 2\n")
    assert digest().model != before.model


def test_a_model_in_another_encoding_is_read(digest, study_path):
    model = study_path.with_name("my_model.py")
    model.write_bytes(b"# coding: latin-1\n# caf\xe9\n" + model.read_bytes())
    assert digest().model


def test_changed_data_are_noticed(digest, study_path):
    before = digest()
    with open(study_path.with_name("events.h5"), "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    assert digest().data != before.data


def test_a_large_file_is_read_only_once(digest, monkeypatch):
    before = digest()
    monkeypatch.setattr(module.hashlib, "file_digest", None)  # reading again would raise
    assert digest() == before


def test_a_copy_of_the_data_has_the_same_digest(digest, study_path):
    before = digest()
    content = study_path.with_name("events.h5").read_bytes()
    study_path.with_name("events.h5").unlink()
    study_path.with_name("events.h5").write_bytes(content)
    assert digest().data == before.data


def test_a_model_of_an_installed_package_needs_no_import(edit, digest):
    edit("my_model.py:Tagger", "torch.nn.modules.linear:Linear")
    assert digest().model


def test_our_own_models_are_the_models_digest_and_not_the_codes(edit, digest, monkeypatch):
    edit("my_model.py:Tagger", "apps.models.jets:DeepSets")
    seen = module._with_local_imports(module.model_file(load(edit('name = "small"', 'name = "s"'))))
    names = {path.name for path in seen}
    assert "jets.py" in names
    assert "train.py" not in names


def test_the_physics_that_a_model_is_judged_by_is_in_the_models_digest(edit, digest):
    edit("my_model.py:Tagger", "apps.models.calorimeter_gan:CalorimeterGan")
    seen = module._with_local_imports(module.model_file(load(edit('name = "small"', 'name = "s"'))))
    assert {"calorimeter_gan.py", "showers.py", "observables.py"} <= {path.name for path in seen}


def test_programs_beside_the_training_are_not_part_of_it():
    """Else they would have to be in the digest of the code."""
    beside = {f"apps.{name}" for name in module.BESIDE}
    for path in [*(ROOT / "apps").glob("*.py"), *(ROOT / "apps/strategies").glob("*.py")]:
        if path.stem not in module.BESIDE:
            assert not imported(path) & beside, path


def test_a_model_file_that_is_not_there_is_named(edit, digest):
    path = edit("my_model.py:Tagger", "my_modle.py:Tagger")
    with pytest.raises(N3LOError) as caught:
        digest()
    assert str(caught.value) == (
        f"{path}:5: model.source: there is no file 'my_modle.py' ({path.parent / 'my_modle.py'})"
    )


def test_a_module_that_is_not_there_is_named(edit, digest):
    path = edit("my_model.py:Tagger", "apps.models.jetz:Tagger")
    with pytest.raises(N3LOError) as caught:
        digest()
    assert str(caught.value) == (
        f"{path}:5: model.source: there is no module 'apps.models.jetz', neither in {sys.prefix} "
        "nor beside the study; a file of your own is named as 'my_model.py:Name' or "
        "'my_package/model.py:Name'"
    )
