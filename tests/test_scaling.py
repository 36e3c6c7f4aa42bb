"""What more ranks gain: speed-ups, efficiencies and shares of the time, by hand; their report."""

from __future__ import annotations

import dataclasses
import io
import re

import pandas as pd
import pytest
from conftest import ROOT, STUDY
from rich.console import Console as Terminal
from test_launch import make_result, make_task
from test_ledger import FINGERPRINT

from apps.contract import Failure
from workflow import scaling
from workflow.exports.files import write_tables
from workflow.ledger import Ledger, session_facts
from workflow.look import print_status
from workflow.plan import largest_shape
from workflow.report import print_report
from workflow.search import Proposal
from workflow.study import Study, load

EXAMPLE = ROOT / "studies" / "scaling.toml"
WORKERS = '"layout.num_workers" = { type = "ordinal", values = [1, 2, 4] }'


def frame(*rows: tuple, names=("strategy", "num_ranks", "samples_per_second")) -> pd.DataFrame:
    """Tasks that spent half of their time computing, a quarter communicating and one waiting."""
    done = pd.DataFrame(rows, columns=list(names))
    seconds = {"compute_s": 2.0, "communication_s": 1.0, "data_s": 1.0, "idle_s": 0.0}
    layout = [f"on {ranks}" for ranks in done["num_ranks"]]
    return done.assign(layout=layout, masters=0, batch=32, **seconds)


def study_of(tmp_path, *dimensions: str, num_workers: int = 1) -> Study:
    """One that searches these dimensions, by allreduce if they do not say otherwise."""
    text = STUDY.replace('"local"', '"allreduce"').partition("[search.space]")[0]
    text = text.replace("[layout]", f"[layout]\nnum_workers = {num_workers}")
    path = tmp_path / "study.toml"
    path.write_text("\n".join([text, "[search.space]", *dimensions, ""]))
    return load(path).study


def tasks_at(points: list[dict], **facts) -> pd.DataFrame:
    """A done task of each point."""
    return pd.DataFrame(points).assign(status="done", **facts)


# -- numbers ---------------------------------------------------------------------------------------


def test_speed_up_and_efficiency_are_against_the_fewest_ranks():
    done = frame(("allreduce", 8, 600.0), ("allreduce", 2, 200.0), ("allreduce", 4, 360.0))
    rows = scaling.compared(done, ["strategy"])
    assert rows["num_ranks"].tolist() == [2, 4, 8]
    assert rows["ideal"].tolist() == [1, 2, 4]
    assert rows["speed_up"].tolist() == pytest.approx([1, 1.8, 3])
    assert rows["efficiency"].tolist() == pytest.approx([1, 0.9, 0.75])


def test_the_speed_of_a_layout_is_the_median_of_its_tasks():
    one = [("allreduce", 1, rate) for rate in (90.0, 100.0, 500.0)]
    rows = scaling.compared(frame(*one, ("allreduce", 2, 150.0)), ["strategy"])
    assert rows["samples_per_second"].tolist() == [100, 150]


def test_each_setting_has_its_own_reference_and_a_missing_value_is_one():
    names = ("strategy", "a.kind", "num_ranks", "samples_per_second")
    done = frame(
        ("allreduce", "x", 1, 100.0), ("allreduce", None, 1, 10.0),
        ("allreduce", "x", 2, 150.0), ("allreduce", None, 2, 20.0), ("downpour", "x", 2, 1.0),
        names=names,
    )  # fmt: skip
    rows = scaling.compared(done, ["strategy", "a.kind"])
    assert rows["a.kind"].fillna("-").tolist() == ["x", "x", "-", "-", "x"]
    assert rows["speed_up"].tolist()[:4] == pytest.approx([1, 1.5, 1, 2])


def test_a_setting_with_one_number_of_ranks_has_no_speed_up_and_comes_last():
    done = frame(("local", 1, 9.0), ("allreduce", 1, 5.0), ("allreduce", 2, 6.0))
    rows = scaling.compared(done, ["strategy"])
    assert rows["strategy"].tolist() == ["allreduce", "allreduce", "local"]
    assert rows.loc[2, ["speed_up", "ideal", "efficiency"]].isna().all()


def test_of_several_layouts_with_the_fewest_ranks_the_fastest_is_the_reference():
    done = frame(("allreduce", 2, 50.0), ("allreduce", 2, 100.0), ("allreduce", 4, 150.0))
    done["layout"] = ["1 x 2", "2 x 1", "2 x 2"]
    rows = scaling.compared(done, ["strategy"])
    assert rows["speed_up"].tolist() == [0.5, 1, 1.5]
    assert rows["efficiency"].tolist() == [0.5, 1, 0.75]


def test_the_shares_of_the_time_are_of_all_tasks_of_a_layout_together():
    done = frame(("allreduce", 1, 1.0), ("allreduce", 1, 1.0), ("allreduce", 2, 1.0))
    done.loc[0, "idle_s"] = 2.0  # 4 + 2 + 2 + 2 = 10 seconds of both
    rows = scaling.compared(done, ["strategy"])
    assert rows.loc[0, list(scaling.PARTS)].tolist() == pytest.approx([0.4, 0.2, 0.2, 0.2])
    assert rows.loc[1, list(scaling.PARTS)].tolist() == pytest.approx([0.5, 0.25, 0.25, 0])


def test_what_was_not_measured_has_no_shares_but_a_speed_up():
    done = frame(("allreduce", 1, 10.0), ("allreduce", 2, 15.0)).assign(
        **dict.fromkeys(scaling.SECONDS, float("nan"))
    )
    rows = scaling.compared(done, ["strategy"])
    assert rows["speed_up"].tolist() == [1, 1.5]
    assert rows[list(scaling.PARTS)].isna().all(axis=None)
    assert scaling.input_bound(done) == ""


def test_a_bar_ends_before_the_ideal_at_it_or_beyond():
    rows = pd.DataFrame({"speed_up": [1.0, 3.0, 2.0], "ideal": [1.0, 2.0, 4.0]})
    assert scaling.bars(rows, width=8) == ["██|", "████|██", "████    |"]


def test_tasks_that_wait_for_data_more_than_a_fifth_of_the_time_are_counted():
    done = frame(*[("allreduce", 1, 1.0)] * 4)
    done["data_s"] = [0.0, 0.75, 0.7, float("nan")]  # of 3 seconds else: a fifth is 0.75
    assert scaling.input_bound(done) == ""
    done.loc[2, "data_s"] = 0.8
    assert scaling.input_bound(done).startswith("input-bound: 1 of 3 tasks waited for data more")
    assert scaling.input_bound(done.head(0)) == ""


# -- settings --------------------------------------------------------------------------------------


def test_a_setting_is_what_may_change_the_speed_apart_from_the_ranks(tmp_path):
    study = study_of(
        tmp_path, WORKERS,
        '"training.optimizer.lr" = { type = "real", low = 0.1, high = 1.0 }',
        '"training.epochs" = { type = "int", low = 1, high = 3 }',
        '"model.args.width" = { type = "choice", values = [2, 4] }',
        '"training.backend" = { type = "choice", values = ["ddp"] }',
    )  # fmt: skip
    points = [
        {"layout.num_workers": 1, "training.optimizer.lr": 0.3, "model.args.width": 2},
        {"layout.num_workers": 2, "training.optimizer.lr": 0.4, "model.args.width": 4},
    ]
    tasks = tasks_at(points, **{"training.epochs": [1, 2], "training.backend": "ddp"})
    done = scaling.described(tasks, study)
    assert scaling.setting_of(done, study) == ["strategy", "model.args.width"]


def test_a_batch_that_is_divided_over_the_ranks_is_no_other_setting(tmp_path):
    """Strong scaling: 64 events an update. With 32 of each rank, sizes are settings."""
    sizes = '"training.batch_size" = { type = "ordinal", values = [16, 32, 64] }'
    study = study_of(tmp_path, WORKERS, sizes)
    names = ("layout.num_workers", "training.batch_size")
    strong = [dict(zip(names, pair, strict=True)) for pair in ((1, 64), (2, 32), (4, 16))]
    done = scaling.described(tasks_at(strong), study)
    assert done["batch"].tolist() == [64, 64, 64]
    assert scaling.setting_of(done, study) == ["strategy"]
    weak = [dict(zip(names, pair, strict=True)) for pair in ((1, 16), (2, 16), (1, 32), (2, 32))]
    done = scaling.described(tasks_at(weak), study)
    assert done["batch"].tolist() == [16, 32, 32, 64]
    assert scaling.setting_of(done, study) == ["strategy", "training.batch_size"]


def test_the_layout_of_a_task_is_told_with_its_masters(tmp_path):
    study = study_of(
        tmp_path,
        '"training.strategy" = { type = "choice", values = ["allreduce", "downpour"] }',
        '"training.exchange.transport" = { type = "choice", values = ["messages", "window"] }',
        num_workers=2,
    )
    points = [
        {"training.strategy": "allreduce", "training.exchange.transport": None},
        {"training.strategy": "downpour", "training.exchange.transport": "messages"},
        {"training.strategy": "downpour", "training.exchange.transport": "window"},
    ]
    failed = tasks_at(points[:1]).assign(status="failed")
    done = scaling.described(pd.concat([tasks_at(points), failed]), study)
    assert done["strategy"].tolist() == ["allreduce", "downpour", "downpour"]
    assert done["masters"].tolist() == [0, 1, 0]
    assert done["layout"].tolist() == [
        "2 workers x 1 rank = 2 ranks",
        "1 master + 2 workers x 1 rank = 3 ranks",
        "2 workers x 1 rank = 2 ranks",
    ]


# -- reports of whole ledgers ----------------------------------------------------------------------


@pytest.fixture
def campaign(tmp_path):
    """A ledger of trials that need no training: their points, with what each measured, or None."""

    def record(*trials: tuple[dict, dict | None]) -> Ledger:
        (tmp_path / "runs").mkdir(exist_ok=True)
        ledger = Ledger(tmp_path / "runs")
        ledger.record_session(**session_facts(FINGERPRINT, site="local"))
        for number, (point, facts) in enumerate(trials):
            ledger.record_trial(Proposal(point, number=number), num_folds=1)
            task = dataclasses.replace(make_task(), trial=number)
            ledger.record_start(task, 1)
            if facts is None:
                failure = Failure(reason="diverged", message="nan")
                ledger.record_failed(task, failure, folder=task.id)
            else:
                result = dataclasses.asdict(make_result(task, **facts))
                ledger.record_done(task, result, cached=False, folder=task.id)
        return Ledger(ledger.folder)

    return record


def report_of(ledger: Ledger, study: Study) -> str:
    """What `report` says, with single spaces; `status` and `export` work too."""
    screen = io.StringIO()
    out = Terminal(file=screen, width=200, markup=False, highlight=False)
    print_status(ledger, study, out)
    write_tables(ledger, ledger.folder / "tasks.csv")
    print_report(ledger, study, out)
    return re.sub(" +", " ", screen.getvalue().partition("Best trials")[2])


def at_rate(ranks: int, rate: float, **seconds: float) -> dict:
    return {"num_ranks": ranks, "samples_per_second": rate, **seconds}


WITH_KIND = '"training.reduction.compression" = { type = "choice", values = ["none", "fp16"] }'


def test_a_report_compares_ranks_within_each_setting(campaign, tmp_path):
    study = study_of(tmp_path, WORKERS, WITH_KIND)
    rates = {("none", 1): 100.0, ("none", 4): 300.0, ("fp16", 1): 80.0, ("fp16", 4): 320.0}
    ledger = campaign(
        *(
            (
                {"layout.num_workers": ranks, "training.reduction.compression": kind},
                at_rate(ranks, rate, compute_s=5.0, communication_s=3.0, data_s=1.0, idle_s=1.0),
            )
            for (kind, ranks), rate in rates.items()
        ),
        ({"layout.num_workers": 2, "training.reduction.compression": "none"}, None),
    )
    said = report_of(ledger, study)
    section = said.partition("Scaling")[2].partition("Cost")[0]
    shares = "50% 30% 10% 10%"
    for line in (
        "strategy compression ranks batch samples/s speed-up efficiency compute communication",
        f"allreduce none 1 16 100 1.00 100% {shares}",
        f"allreduce none 4 64 300 3.00 75% {shares}",
        f"allreduce fp16 1 16 80 1.00 100% {shares}",
        f"allreduce fp16 4 64 320 4.00 100% {shares}",
    ):
        assert line in section
    assert "Speed-up; ideal where the | is" in section
    assert f"allreduce none 4 {'█' * 30} |" in section
    assert f"allreduce fp16 4 {'█' * 40}|" in section
    assert "masters" not in section
    assert "input-bound" not in said


def test_a_report_says_that_masters_are_among_the_ranks(campaign, tmp_path):
    strategies = '"training.strategy" = { type = "choice", values = ["allreduce", "downpour"] }'
    study = study_of(tmp_path, strategies, num_workers=2)
    ledger = campaign(
        ({"training.strategy": "allreduce"}, at_rate(2, 100.0)),
        ({"training.strategy": "downpour"}, at_rate(3, 50.0)),
    )
    said = report_of(ledger, study)
    assert "allreduce 2 2 workers x 1 rank = 2 ranks 32 100 - - " in said
    assert "downpour 3 1 master + 2 workers x 1 rank = 3 ranks 16 50 - - " in said
    assert "masters count as ranks" in said
    assert "Speed-up; ideal" not in said


def test_a_long_comparison_is_cut_and_says_so(campaign, tmp_path):
    width = '"model.args.width" = { type = "int", low = 1, high = 30 }'
    study = study_of(tmp_path, WORKERS, width)
    points = [{"layout.num_workers": 1 + number % 2, "model.args.width": 1 + number}
              for number in range(30)]  # fmt: skip
    ledger = campaign(*((point, at_rate(point["layout.num_workers"], 1.0)) for point in points))
    said = report_of(ledger, study)
    assert "... and 6 more; `export` has all tasks" in said
    assert said.count("allreduce") == 24


def test_trials_on_as_many_ranks_have_no_such_section(campaign, tmp_path):
    study = study_of(tmp_path, WORKERS)
    said = report_of(campaign(({"layout.num_workers": 2}, at_rate(2, 9.0))), study)
    assert "Scaling" not in said
    assert "9 samples/s in the median training" in said


def test_a_single_trial_is_told_that_it_waits_for_data(campaign, tmp_path):
    study = study_of(tmp_path, WORKERS)
    slow = at_rate(1, 9.0, compute_s=1.0, communication_s=0.0, idle_s=0.0, data_s=1.0)
    assert (
        "input-bound: 1 of 1 tasks waited for data more than 20% of the time (data.memory_gb, "
        "data.cache, larger chunks would help)\n"
    ) in report_of(campaign(({"layout.num_workers": 1}, slow)), study)


def test_a_report_without_a_result_has_nothing_to_compare(campaign, tmp_path):
    study = study_of(tmp_path, WORKERS)
    for ledger in (campaign(), campaign(*(({"layout.num_workers": n}, None) for n in (1, 2)))):
        said = report_of(ledger, study)
        assert "Scaling" not in said
        assert "0 trainings, 0 taken from the cache" in said


def test_a_run_of_an_earlier_version_is_compared_by_its_rates(campaign, tmp_path):
    study = study_of(tmp_path, WORKERS)
    points = [({"layout.num_workers": n}, at_rate(n, 10.0 * n)) for n in (1, 2)]
    ledger = campaign(*points)
    text = re.sub(r'"(\w+_s|start_epoch)": [\d.]+, ', "", ledger.path.read_text())
    assert "compute_s" not in text
    ledger.path.write_text(text)
    said = report_of(Ledger(ledger.folder), study)
    assert "allreduce 2 32 20 2.00 100% - - - -" in said
    assert "input-bound" not in said


# -- the example -----------------------------------------------------------------------------------


def variant(tmp_path, search: str, dimension: str):
    """The example with what its comments say to add."""
    text = EXAMPLE.read_text()
    for line in (search, dimension):
        assert line in text.partition("name =")[0]
    text = text.replace('"data/', f'"{EXAMPLE.parent}/data/')
    text = text.replace("[search]\nmethod", f"[search]\n{search}\nmethod")
    if search.startswith("num_trials"):
        text = text.replace("num_trials   = 3\n", "")
    path = tmp_path / "scaling.toml"
    path.write_text(f"{text}\n{dimension}\n")
    return load(path)


def test_the_example_plans_a_task_on_each_number_of_ranks(n3lo):
    planned = n3lo("plan", EXAMPLE, "--set", "cores=4")
    assert planned.returncode == 0, planned.stderr
    assert re.findall(r"t\d\d\d-f0: .*?(?:-np?|--np) (\d+) ", planned.stdout) == ["1", "2", "4"]
    assert "tasks at once: 1, each of 4 ranks" in planned.stdout


def test_the_example_becomes_strong_scaling_as_its_comments_say(tmp_path):
    file = variant(
        tmp_path,
        'constraints = ["layout.num_workers * training.batch_size == 128"]',
        '"training.batch_size" = { type = "ordinal", values = [32, 64, 128] }',
    )
    points = list(file.space.grid())
    done = scaling.described(tasks_at(points), file.study)
    assert sorted(done["layout.num_workers"]) == [1, 2, 4]
    assert set(done["batch"]) == {128}
    assert largest_shape(file).num_ranks == 4


def test_the_example_takes_a_second_question_as_its_comments_say(tmp_path):
    kinds = '"training.reduction.compression" = { type = "choice", values = ["none", "powersgd"] }'
    file = variant(tmp_path, "num_trials = 6", kinds)
    points = list(file.space.grid())
    assert len(points) == file.study.search.num_trials == 6
    done = scaling.described(tasks_at(points), file.study)
    assert scaling.setting_of(done, file.study) == ["strategy", "training.reduction.compression"]
