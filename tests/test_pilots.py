"""What a user hears of pilots, from an executor that does as Parsl's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from parsl.jobs.states import JobState, JobStatus

from workflow.pilots import LOOK_S, SILENT_S, Watch


@pytest.fixture
def executor():
    made = SimpleNamespace(
        status_facade={}, blocks_to_job_id={"0": "17"}, address="10.0.0.1", connected=[]
    )
    made.command_client = SimpleNamespace(run=lambda command, timeout_s: made.connected)
    return made


@pytest.fixture
def pilots(executor):
    return Watch(executor)


def test_each_change_of_a_pilot_is_told_once(executor, pilots):
    told = []
    for state in ("PENDING", "PENDING", "RUNNING", "RUNNING", "TIMEOUT", "TIMEOUT"):
        executor.status_facade = {"0": JobStatus(JobState[state])}
        told += pilots.news(0.0)
    assert told == ["job 17 is in the queue", "job 17 runs", "job 17 has reached its walltime"]


def test_a_pilot_that_fails_is_told_with_the_file_that_says_why(executor, pilots, tmp_path):
    path = tmp_path / "block-0.stderr"
    executor.status_facade = {"0": JobStatus(JobState.FAILED, stderr_path=str(path))}
    [told] = pilots.news(0.0)
    assert told.startswith("job 17 failed; see ")
    assert told.endswith("block-0.stderr")


def test_a_refused_submission_is_told_with_what_the_batch_system_said(executor, pilots):
    message = "Failed to start block 1: sbatch: error:\n invalid account"
    executor.status_facade = {"1": JobStatus(JobState.FAILED, message)}
    assert list(pilots.news(0.0)) == [
        "no job could be submitted: Failed to start block 1: sbatch: error: invalid account"
    ]


def test_pilots_that_the_driver_ends_are_not_told(executor, pilots):
    executor.status_facade = {"0": JobStatus(JobState.SCALED_IN)}
    assert list(pilots.news(0.0)) == []


def test_a_pilot_whose_workers_do_not_come_is_warned_of_once(executor, pilots):
    executor.status_facade = {"0": JobStatus(JobState.RUNNING)}
    assert list(pilots.news(0.0)) == ["job 17 runs"]
    assert list(pilots.news(SILENT_S - 1.0)) == []
    [warning] = pilots.news(SILENT_S + LOOK_S)
    assert "job 17 runs for 130 s and no worker of it has come" in warning
    assert "10.0.0.1" in warning
    assert list(pilots.news(10 * SILENT_S)) == []


def test_a_pilot_with_workers_is_not_warned_of(executor, pilots):
    executor.status_facade = {"0": JobStatus(JobState.RUNNING)}
    executor.connected = ["0"]
    assert list(pilots.news(0.0)) == ["job 17 runs"]
    assert list(pilots.news(10.0 * SILENT_S)) == []
