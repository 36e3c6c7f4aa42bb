"""A study file: what it says, and the one line that each mistake gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from apps.contract import N3LOError
from workflow.study import load


def line(path: Path, text: str) -> int:
    """The number of the first line that holds `text`."""
    return next(i for i, said in enumerate(path.read_text().splitlines(), 1) if text in said)


def error_of(path: Path) -> str:
    with pytest.raises(N3LOError) as caught:
        load(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_study_is_read(study_path):
    study = load(study_path).study
    assert study.name == "small"
    assert study.data.folds == 2
    assert study.training.optimizer == {"name": "sgd", "lr": 0.1}
    assert list(study.search.space) == ["training.optimizer.lr", "model.args.width"]


def test_a_trial_is_the_study_with_values_replaced(study_path):
    file = load(study_path)
    study = file.at({"training.optimizer.lr": 0.5, "model.args.width": 7})
    assert study.training.optimizer == {"name": "sgd", "lr": 0.5}
    assert study.model.args == {"width": 7}
    assert file.study.model.args == {"width": 4}


def test_a_value_with_a_default_can_be_searched_though_the_file_does_not_name_it(edit):
    path = edit('"model.args.width" =', '"layout.num_workers" =')
    assert load(path).at({"layout.num_workers": 3}).layout.num_workers == 3


MISTAKES = [
    ("epochs = 2", "epoch = 2", "training: unknown key 'epoch'; did you mean 'epochs'?"),
    ("seed = 5", "sead = 5", "unknown key 'sead'; did you mean 'seed'?"),
    ("epochs = 2", 'epochs = "ten"', 'training.epochs: "ten" is not a whole number'),
    ("epochs = 2", "epochs = 2.5", "training.epochs: 2.5 is not a whole number"),
    ("epochs = 2", "epochs = true", "training.epochs: true is not a whole number"),
    ("epochs = 2", "epochs = 0", "training: epochs: 0 is not at least 1"),
    ('files = ["events.h5"]', 'files = "events.h5"',
     'data.files: "events.h5" is not a list in [ ]'),
    ('strategy = "local"', 'strategy = "locl"',
     "training.strategy: 'locl' is none of 'local', 'allreduce'"),
    ('optimizer = { name = "sgd", lr = 0.1 }', "optimizer = { lr = 0.1 }",
     "training: optimizer: needs a name, as in { name = 'adam' }"),
    ("low = 1e-3, high = 1.0", "low = 2.0, high = 1.0",
     'search.space."training.optimizer.lr": low 2.0 is not below high 1.0'),
    ("low = 1e-3, high = 1.0", "low = 0.0, high = 1.0",
     'search.space."training.optimizer.lr": log needs low above 0, not 0.0'),
    ('type = "int"', 'type = "integer"',
     "search.space.\"model.args.width\": type 'integer' is none of 'real', 'int', 'choice'"),
    ("num_trials = 3\n", "", "search.num_trials is missing"),
    ('source = "my_model.py:Tagger"', 'source = "my_model.py"',
     "model: 'my_model.py' is not of the form 'package.module:Name' or 'file.py:Name'"),
    ('metric = "val_loss"', 'metric = "val_los"',
     "search.objective.metric: there is no metric 'val_los'; with these training.metrics there "
     "are: loss, accuracy, val_loss, val_accuracy"),
    ('name = "small"', 'name = "../small"',
     "name: '../small' must be letters, digits, '.', '_', '-' (it names a folder)"),
    ("lr = 0.1 }", "lr = inf }", "training.optimizer.lr: inf is not finite"),
    ("epochs = 2", "epochs = 2\nmax_minutes = -1.0", "training: max_minutes: -1.0 is not above 0"),
    ("epochs = 2", "epochs = 2\nlanes = 0", "training: lanes: 0 is not at least 1"),
    ('name = "sgd"', "name = 3", "training: optimizer: needs a name, as in { name = 'adam' }"),
    ('name = "small"', 'name = "cache"',
     "name: 'cache' is the folder of the results of all studies"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "said"), MISTAKES, ids=[said for _, _, said in MISTAKES])
def test_a_mistake_in_the_study_gets_one_line(edit, old, new, said):
    path = edit(old, new)
    message = error_of(path)
    assert message.startswith(f"{path}:") or message.startswith(f"{path}: ")
    assert message.endswith(said)


def test_the_line_of_the_mistake_is_named(edit):
    path = edit("epochs = 2", "epoch = 2")
    assert error_of(path).startswith(f"{path}:{line(path, 'epoch = 2')}: ")


def test_a_path_that_leads_nowhere_suggests_the_nearest(edit):
    path = edit('"model.args.width" =', '"model.args.widht" =')
    where = line(path, "widht")
    assert error_of(path) == (
        f"{path}:{where}: search.space: 'model.args.widht' leads nowhere: model.args has no "
        "'widht'; did you mean 'width'?"
    )


def test_a_path_outside_of_the_trial_cannot_be_searched(edit):
    path = edit('"model.args.width" =', '"search.num_trials" =')
    assert error_of(path).endswith(
        "search.space: 'search.num_trials' cannot be searched; it must be a value of [model], "
        "[data], [training] or [layout]"
    )


def test_the_folds_cannot_be_searched(edit):
    path = edit('"model.args.width" =', '"data.folds" =')
    assert error_of(path).endswith("'data.folds' cannot be searched: it is the same for all trials")


def test_a_bound_at_which_the_study_is_not_valid_is_named(edit):
    path = edit('"model.args.width" = { type = "int", low = 2',
                '"training.batch_size" = { type = "int", low = 0')  # fmt: skip
    assert error_of(path).endswith(
        "'training.batch_size' = 0 is not valid: training: batch_size: 0 is not at least 1"
    )


def test_text_that_is_not_toml_gets_its_line(edit):
    path = edit("epochs = 2", "epochs = ")
    assert error_of(path).startswith(f"{path}: not valid TOML: ")


def test_a_study_that_is_not_there_is_named_with_its_neighbours(study_path):
    path = study_path.with_name("smal.toml")
    assert error_of(path) == (
        f"there is no study file '{path}'; in '{path.parent}' there are: small.toml"
    )


def test_a_missing_data_file_is_named_with_its_full_path(study_path):
    study_path.with_name("events.h5").unlink()
    with pytest.raises(N3LOError) as caught:
        load(study_path).data_files()
    where = line(study_path, "files")
    assert str(caught.value) == (
        f"{study_path}:{where}: data.files: there is no file 'events.h5' "
        f"({study_path.parent / 'events.h5'})"
    )


def test_a_file_that_is_named_twice_would_leak_into_validation(edit):
    path = edit('files = ["events.h5"]', 'files = ["events.h5", "*.h5"]')
    with pytest.raises(N3LOError) as caught:
        load(path).data_files()
    assert str(caught.value) == (
        f"{path}:9: data.files: '*.h5' names {path.parent / 'events.h5'} once more"
    )


def test_a_study_in_a_folder_with_brackets_finds_its_files(study_path):
    folder = study_path.parent / "run[1]"
    folder.mkdir()
    for name in ("small.toml", "events.h5"):
        (folder / name).write_bytes((study_path.parent / name).read_bytes())
    assert load(folder / "small.toml").data_files() == [folder / "events.h5"]


def test_a_section_that_is_no_table_is_told_though_the_command_line_replaces_in_it(edit):
    path = edit("name", "name")
    path.write_text("search = 3\n" + path.read_text().partition("[search]")[0])
    with pytest.raises(N3LOError, match="search: 3 is not a table"):
        load(path, {"search.num_trials": 2})


def test_a_pattern_gives_its_files_sorted(edit):
    path = edit('files = ["events.h5"]', 'files = ["part*.h5"]')
    for name in ("part2.h5", "part1.h5"):
        (path.parent / name).touch()
    assert [file.name for file in load(path).data_files()] == ["part1.h5", "part2.h5"]
