"""A study file: what it says, and the one line that each mistake gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from apps.contract import N3LOError, Objective
from workflow.space import Choice, Integer, Ordinal
from workflow.study import RESULT_FACTS, Racing, Stop, load


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


def test_files_of_one_entry_have_one_number(edit):
    path = edit('"y"', '"@file"')
    files = 'files = ["events.h5", "qcd_*.h5"]'
    path.write_text(path.read_text().replace('files = ["events.h5"]', files))
    for name in ("qcd_1.h5", "qcd_2.h5"):
        (path.parent / name).touch()
    assert load(path).file_numbers() == [0, 1, 1]
    edit(files, f"{files}\nfile_numbers = [0.5, 2]")
    assert load(path).file_numbers() == [0.5, 2, 2]
    edit("[0.5, 2]", "[0.5]")
    with pytest.raises(N3LOError, match=r"toml:\d+: data.file_numbers: 1 numbers are not one for"):
        load(path).file_numbers()
    edit('"@file"', '"y"')
    with pytest.raises(N3LOError, match=r"data.file_numbers: no field is '@file', which"):
        load(path).file_numbers()


def test_a_trial_is_the_study_with_values_replaced(study_path):
    file = load(study_path)
    study = file.at({"training.optimizer.lr": 0.5, "model.args.width": 7})
    assert study.training.optimizer == {"name": "sgd", "lr": 0.5}
    assert study.model.args == {"width": 7}
    assert file.study.model.args == {"width": 4}


@pytest.mark.parametrize("name", ["my arg", "größe", "a'b"])
def test_an_argument_of_any_name_can_be_searched(edit, name):
    edit("args = { width = 4 }", f'args = {{ "{name}" = 4 }}')
    path = edit('"model.args.width" =', f'"model.args.{name}" =')
    assert load(path).at({f"model.args.{name}": 7}).model.args == {name: 7}


def test_a_part_of_a_default_table_can_be_searched_though_the_file_does_not_name_it(edit):
    path = edit('optimizer = { name = "sgd", lr = 0.1 }\n', "")
    assert load(path).at({"training.optimizer.lr": 0.5}).training.optimizer == {
        "name": "adam", "lr": 0.5,
    }  # fmt: skip
    edit('"training.optimizer.lr" =', '"training.optimizer.name" =')
    edit('type = "real", low = 1e-3, high = 1.0, log = true', 'type = "choice", values = ["adam"]')
    assert load(path).at({"training.optimizer.name": "sgd"}).training.optimizer == {
        "name": "sgd", "lr": 1e-3,
    }  # fmt: skip


def test_a_value_with_a_default_can_be_searched_though_the_file_does_not_name_it(edit):
    edit('strategy = "local"', 'strategy = "allreduce"')
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
     "training.strategy: 'locl' is none of 'local', 'allreduce', 'sharded', "
     "'tensor', 'pipeline', 'downpour', 'easgd', 'gem'"),
    ('optimizer = { name = "sgd", lr = 0.1 }', "optimizer = { lr = 0.1 }",
     "training: optimizer: needs a name, as in { name = 'adam' }"),
    ("low = 1e-3, high = 1.0", "low = 2.0, high = 1.0",
     'search.space."training.optimizer.lr": low 2.0 is not below high 1.0'),
    ("low = 1e-3, high = 1.0", "low = 0.0, high = 1.0",
     'search.space."training.optimizer.lr": log needs low above 0, not 0.0'),
    ('type = "int"', 'type = "integer"',
     "search.space.\"model.args.width\": type 'integer' is none of 'real', 'int', 'choice', "
     "'ordinal'"),
    ('"model.args.width" = { type = "int", low = 2, high = 8 }',
     '"model.args.width" = { type = "choice", low = 2 }',
     "search.space.\"model.args.width\": unknown key 'low'; there are: when, values, type"),
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


WIDTH = '"model.args.width" = { type = "int", low = 2, high = 8 }'
TRIALS = "num_trials = 3"

MISTAKES += [
    (TRIALS, "num_trials = 0", "search: num_trials: 0 is not at least 1"),
    (TRIALS, f"{TRIALS}\nprepare_ahead = -1", "search: prepare_ahead: -1 is not at least 0"),
    (TRIALS, f"{TRIALS}\nspread_penalty = -0.5",
     "search: spread_penalty: -0.5 is not at least 0"),
    (TRIALS, f"{TRIALS}\nracing = {{ alpha = 0.5 }}",
     "search.racing: alpha: 0.5 is not above 0 and below 0.5"),
    (TRIALS, f"{TRIALS}\nracing = {{ alpha = 0.0 }}",
     "search.racing: alpha: 0.0 is not above 0 and below 0.5"),
    (TRIALS, f"{TRIALS}\nracing = {{ min_folds = 0 }}",
     "search.racing: min_folds: 0 is not at least 1"),
    (TRIALS, f"{TRIALS}\nracing = {{ min_folds = 2 }}",
     "search.racing: needs data.folds above min_folds = 2, not 2"),
    (TRIALS, f"{TRIALS}\nracing = {{ alfa = 0.1 }}",
     "search.racing: unknown key 'alfa'; did you mean 'alpha'?"),
    (TRIALS, f"{TRIALS}\nstop = {{ no_improvement = 0 }}",
     "search.stop: no_improvement: 0 is not at least 1"),
    (TRIALS, f"{TRIALS}\nstop = {{ failures = 0 }}",
     "search.stop: failures: 0 is not at least 1"),
    (TRIALS, f"{TRIALS}\nstop = {{ hours = 0 }}", "search.stop: hours: 0.0 is not above 0"),
    (TRIALS, f"{TRIALS}\nstop = {{ node_hours = -1.0 }}",
     "search.stop: node_hours: -1.0 is not above 0"),
    (TRIALS, f"{TRIALS}\nstop = {{ value = true }}", "search.stop.value: true is not a number"),
    (TRIALS, f"{TRIALS}\nstop = {{ valeu = 1 }}",
     "search.stop: unknown key 'valeu'; did you mean 'value'?"),
    (TRIALS, f'{TRIALS}\nfurther_objectives = [{{ metric = "val_accuracy", goal = "max" }}]',
     "search: further_objectives: only ('multi', 'optuna') have them, not 'random'"),
    ('method = "random"', 'method = "multi"',
     "search: further_objectives: method 'multi' needs at least one"),
    ('method = "random"', 'method = "multi"\nfurther_objectives = [{ goal = "min" }]',
     "search: further_objectives: 'val_loss' is an objective twice"),
    ('method = "random"',
     'method = "multi"\nfurther_objectives = [{ metric = "second", goal = "min" }]',
     "search.further_objectives: there is no metric 'second'; with these training.metrics there "
     "are: loss, accuracy, val_loss, val_accuracy, num_parameters, seconds, samples_per_second, "
     "inference_us"),
    ('method = "random"',
     'method = "multi"\nfurther_objectives = [{ metrc = "seconds", goal = "min" }]',
     "search.further_objectives.0: unknown key 'metrc'; did you mean 'metric'?"),
    ('metric = "val_loss"', 'metric = "seconds"',
     "search.objective.metric: there is no metric 'seconds'; with these training.metrics there "
     "are: loss, accuracy, val_loss, val_accuracy"),
    ('type = "int", low = 2, high = 8', 'type = "ordinal", values = [2]',
     'search.space."model.args.width": values: name at least two'),
    ("low = 2, high = 8", 'low = 2, high = 8, wen = { "data.shuffle" = [true] }',
     "search.space.\"model.args.width\": unknown key 'wen'; did you mean 'when'?"),
    ("low = 2, high = 8", "low = 2, high = 8, when = 3",
     'search.space."model.args.width".when: 3 is not a table'),
    ("low = 2, high = 8", 'low = 2, high = 8, when = { "data.shuffle" = [true] }',
     "search.space: 'model.args.width': when: 'data.shuffle' is no dimension of the space"),
    ("low = 2, high = 8", 'low = 2, high = 8, when = { "training.optimizer.lr" = [0.1] }',
     "search.space: 'model.args.width': when: 'training.optimizer.lr' is real; only a choice, an "
     "ordinal or an int can be named"),
    (WIDTH, WIDTH.replace("8 }", '8, when = { "data.shuffle" = [1] } }')
     + '\n"data.shuffle" = { type = "choice", values = [true, false] }',
     "search.space: 'model.args.width': when: 'data.shuffle' is never 1"),
    (TRIALS, f'{TRIALS}\nconstraints = ["model.args.width <"]',
     "search.constraints: 'model.args.width <' is not an expression"),
    (TRIALS, f'{TRIALS}\nconstraints = ["model.args.widht < 3"]',
     "search.constraints: 'model.args.widht < 3': 'model.args.widht' is no dimension of the "
     "space; did you mean 'model.args.width'?"),
    (TRIALS, f'{TRIALS}\nconstraints = ["model.args.width < 2", "training.optimizer.lr < 1"]',
     "search.constraints: no point of 10000 satisfies 'model.args.width < 2'"),
    (TRIALS, f"{TRIALS}\nconstraints = [\"model.args.width < 'a'\"]",
     "search.constraints: 'model.args.width < 'a'': '<' not supported between instances of 'int' "
     "and 'str'"),
    (TRIALS, f'{TRIALS}\nconstraints = "model.args.width < 3"',
     'search.constraints: "model.args.width < 3" is not a list in [ ]'),
    (TRIALS, f'{TRIALS}\nfirst_points = [{{}}, {{ "model.args.widht" = 3 }}]',
     "search.first_points: point 2: 'model.args.widht' is no dimension of the space; did you mean "
     "'model.args.width'?"),
    (TRIALS, f'{TRIALS}\nfirst_points = [{{ "model.args.width" = 9 }}]',
     "search.first_points: point 1: 'model.args.width' = 9 is not a whole number from 2 to 8"),
    (TRIALS, f'{TRIALS}\nfirst_points = [{{ "model.args.width" = true }}]',
     "search.first_points: point 1: 'model.args.width' = True is not a whole number from 2 to 8"),
    (TRIALS, f'{TRIALS}\nfirst_points = [{{ "training.optimizer.lr" = nan }}]',
     "search.first_points: point 1: 'training.optimizer.lr' = nan is not a number from 0.001 to "
     "1.0"),
    (TRIALS, f'{TRIALS}\nfirst_points = [{{ "model.args.width" = [3] }}]',
     'search.first_points.0."model.args.width": [3] is not a number, a text, true or false'),
    (TRIALS, f"""{TRIALS}
constraints = ["model.args.width <= 4"]
first_points = [{{ "model.args.width" = 5 }}]""",
     "search.first_points: point 1: 'model.args.width <= 4' does not hold"),
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


def test_a_remote_file_is_fetched_once_by_the_users_command(edit, tmp_path):
    edit('files = ["events.h5"]', 'files = ["root://eos.cern.ch//eos/a/events.h5"]')
    store, log = tmp_path / "store.h5", tmp_path / "asked.txt"
    (tmp_path / "events.h5").rename(store)
    fetch = tmp_path / "fetch.sh"
    fetch.write_text(f'echo "$1" >> {log}; cp {store} "$2"')
    path = edit("folds = 2", f'folds = 2\ncopy_command = "sh {fetch} {{}} {{}}"')
    for _ in range(2):
        [file] = load(path).data_files(tmp_path / "fetched")
        assert file.parent == tmp_path / "fetched"
        assert file.read_bytes() == store.read_bytes()
    assert log.read_text() == "root://eos.cern.ch//eos/a/events.h5\n"


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (None, 'is remote; set data.copy_command to what fetches it, such as "xrdcp {} {}"'),
        ("sh -c 'echo no route to host >&2; exit 3' {} {}", "no route to host"),
        ("no-such-xrdcp {} {}", "'no-such-xrdcp': No such file or directory"),
    ],
)
def test_a_remote_file_that_cannot_be_fetched_is_told_in_one_line(
    edit, tmp_path, monkeypatch, command, reason
):
    monkeypatch.delenv("DATA_COPY_COMMAND", raising=False)
    path = edit('files = ["events.h5"]', 'files = ["s3://bucket/events.h5"]')
    if command is not None:
        edit("folds = 2", f'folds = 2\ncopy_command = "{command}"')
    with pytest.raises(N3LOError) as caught:
        load(path).data_files(tmp_path / "fetched")
    said = str(caught.value)
    assert said.startswith(f"{path}:{line(path, 'files')}: data.files: 's3://bucket/events.h5' ")
    assert reason in said
    assert "\n" not in said
    assert not list((tmp_path / "fetched").glob("n3lo-*"))


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


# What a search may say


def test_a_search_says_as_little_as_it_used_to(study_path):
    search = load(study_path).study.search
    assert (search.further_objectives, search.constraints, search.first_points) == ([], [], [])
    assert (search.warm_start, search.racing, search.spread_penalty) == ([], None, 0.0)
    assert search.prepare_ahead == 0
    assert search.stop == Stop(failures=10)


def test_a_search_may_say_all_of_this(edit):
    path = edit(
        "num_parallel = 2",
        """num_parallel = 2
spread_penalty = 1
racing = { alpha = 0.1 }
stop = { value = 1, no_improvement = 7, node_hours = 2, hours = 0.5, failures = 3 }
first_points = [{ "training.optimizer.lr" = 1, "model.args.width" = 4 }, { }]
warm_start = ["runs/older"]""",
    )
    search = load(path).study.search
    assert search.spread_penalty == 1.0
    assert search.racing == Racing(alpha=0.1, min_folds=1)
    assert search.stop == Stop(value=1.0, no_improvement=7, node_hours=2.0, hours=0.5, failures=3)
    assert search.first_points == [{"training.optimizer.lr": 1, "model.args.width": 4}, {}]
    assert search.warm_start == ["runs/older"]


@pytest.mark.parametrize("metric", [*RESULT_FACTS, "accuracy", "val_accuracy", "loss"])
def test_further_objectives_are_metrics_or_facts_of_the_result(edit, metric):
    path = edit(
        'method = "random"',
        f"""method = "multi"
further_objectives = [{{ metric = "{metric}", goal = "min" }}]""",
    )
    [further] = load(path).study.search.further_objectives
    assert further == Objective(metric=metric, goal="min")


@pytest.mark.parametrize("wish", ["spread_penalty = 0.1", "racing = {}"])
def test_what_compares_folds_needs_them(edit, wish):
    edit("folds = 2", "folds = 1")
    said = error_of(edit(TRIALS, f"{TRIALS}\n{wish}"))
    assert "search." + wish.split(" =")[0] + ": needs data.folds " in said
    assert said.endswith(", not 1")


def test_a_mistake_in_a_section_is_told_with_the_line_of_its_key(edit):
    path = edit(TRIALS, f"{TRIALS}\nspread_penalty = -1.0")
    assert error_of(path).startswith(f"{path}:{line(path, 'spread_penalty')}: search: ")
    path = edit("spread_penalty = -1.0", "racing = { min_folds = 2 }")
    assert error_of(path).startswith(f"{path}:{line(path, 'racing')}: search.racing: ")


CONDITIONAL = """\
"model.args.width" = { type = "ordinal", values = [2, 8], when = { "data.shuffle" = [true] } }
"data.shuffle" = { type = "choice", values = [true, false] }
"""


def test_a_space_with_ordinals_conditions_and_constraints_is_read(edit):
    edit(TRIALS, f'{TRIALS}\nconstraints = ["training.optimizer.lr * model.args.width <= 1"]')
    space = load(edit(WIDTH, CONDITIONAL)).space
    assert space.dimensions["model.args.width"] == Ordinal(
        values=[2, 8], when={"data.shuffle": [True]}
    )
    assert space.dimensions["data.shuffle"] == Choice(values=[True, False])
    assert [each.text for each in space.constraints] == [
        "training.optimizer.lr * model.args.width <= 1"
    ]
    assert space.contains({"training.optimizer.lr": 0.9, "data.shuffle": False})
    assert not space.contains(
        {"training.optimizer.lr": 0.9, "data.shuffle": True, "model.args.width": 8}
    )


def test_the_line_of_the_dimension_or_constraint_at_fault_is_named(edit):
    edit(TRIALS, f'{TRIALS}\nconstraints = ["training.optimizer.lr <= 1"]')
    path = edit(WIDTH, CONDITIONAL.replace("[true] }", "[3] }"))
    assert error_of(path).startswith(f"{path}:{line(path, 'ordinal')}: search.space: ")
    path = edit("[3] }", "[true] }")
    assert load(path).study.search.constraints
    path = edit("lr <= 1", "lr <= 0")
    assert error_of(path).startswith(f"{path}:{line(path, 'constraints')}: search.constraints: ")


def test_first_points_respect_conditions_and_may_leave_values_out(edit):
    edit(WIDTH, CONDITIONAL)
    first = 'first_points = [{ "training.optimizer.lr" = 0.1 }, { "data.shuffle" = false }]'
    path = edit(TRIALS, f"{TRIALS}\n{first}")
    assert len(load(path).study.search.first_points) == 2
    path = edit('"data.shuffle" = false }]', '"data.shuffle" = false, "model.args.width" = 2 }]')
    assert error_of(path).endswith(
        "search.first_points: point 2: 'model.args.width' needs 'data.shuffle' to be one of [True]"
    )


def test_the_ends_of_a_dimension_are_tried_where_it_is_active(edit):
    edit('strategy = "local"', 'strategy = "allreduce"')
    path = edit(
        WIDTH,
        """\
"training.batch_size" = { type = "ordinal", values = [8, 0], when = { "data.folds" = [1] } }
""".replace("data.folds", "layout.num_workers")
        + """\
"layout.num_workers" = { type = "int", low = 1, high = 2 }
""",
    )
    assert error_of(path).endswith(
        "'training.batch_size' = 0 is not valid: training: batch_size: 0 is not at least 1"
    )
    assert load(edit("[8, 0]", "[8, 1]")).space.size == float("inf")


def test_the_studys_own_values_are_those_that_a_trial_could_replace(study_path):
    own = load(study_path).own_values()
    assert own["training.optimizer.lr"] == 0.1
    assert own["training.optimizer.name"] == "sgd"
    assert own["model.args.width"] == 4
    assert own["layout.num_workers"] == 1  # by default
    assert own["data.shuffle"] is True
    assert not {"name", "seed", "search.num_trials", "training.clip_norm", "data.files"} & set(own)
    assert all(isinstance(value, bool | int | float | str) for value in own.values())


def test_a_row_of_the_study_before_it_was_edited_fits_it_with_its_own_values(edit):
    path = edit(WIDTH, "")
    file = load(path)
    row = {"training.optimizer.lr": 0.5, "model.args.width": 4}
    assert file.space.completed(row, file.own_values()) == {"training.optimizer.lr": 0.5}
    assert file.space.completed({**row, "model.args.width": 5}, file.own_values()) is None


def test_an_integer_dimension_keeps_its_condition(edit):
    path = edit(
        WIDTH, CONDITIONAL.replace('"ordinal", values = [2, 8]', '"int", low = 2, high = 8')
    )
    dimension = load(path).space.dimensions["model.args.width"]
    assert dimension == Integer(low=2, high=8, when={"data.shuffle": [True]})
