"""``loaderd doctor``: of running trainings, and of shards."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import loaderd
from loaderd.observe.running_streams import running_streams
from tests.helpers.commands import run

Start = Callable[..., "subprocess.Popen[str]"]


def doctor(*arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    return run("doctor", *arguments, folder=folder)


def test_a_running_training_is_found_and_diagnosed(start_training: Start):
    training, other = start_training(0.1), start_training(0.1)
    done = doctor(str(training.pid), "--json")
    assert done.returncode == 0, done.stderr
    (case,) = json.loads(done.stdout)
    assert case["pid"] == training.pid and "watched_training.py" in case["who"]
    assert case["diagnosis"]["verdict"] == "the model" and 1 < case["diagnosis"]["steps_per_s"] < 10
    found = {stream.consumer for stream in running_streams()}
    assert {training.pid, other.pid} <= found
    text = doctor(str(training.pid), str(other.pid)).stdout
    assert text.count("The training is as fast as its model.") == 2 and "Evidence:" in text and "Advice:" in text


@pytest.mark.slow
def test_a_training_that_waits_is_an_exit_status(start_training: Start):
    training = start_training(0.0, batch_s=0.005)
    assert doctor(str(training.pid), "--max-waiting", "1").returncode == 0
    done = doctor(str(training.pid), "--max-waiting", "0.01", "--json")
    (case,) = json.loads(done.stdout)
    assert case["diagnosis"]["waiting_share"] > 0.01 and done.returncode == 1


@pytest.mark.parametrize("share", ["10", "-0.1", "nan"])
def test_what_is_no_share_of_the_time(share: str):
    done = doctor(str(os.getpid()), "--max-waiting", share)
    assert done.returncode == 2 and "--max-waiting must be a share of the time, from 0 to 1, got" in done.stderr


@pytest.mark.slow
def test_a_training_that_has_not_begun(
    write_numbered: Callable[[Sequence[int]], list[Path]], numbered_schema: loaderd.Schema
):
    with loaderd.Loader(write_numbered([100]), numbered_schema, batch_size=10, workers=1):
        done = doctor(str(os.getpid()))
    assert done.returncode == 2 and "batches have come for less than three seconds" in done.stdout, done


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (
            ("nonsense",),
            "TARGETs must be numbers of processes, or addresses of servers, got 'nonsense'",
        ),
        (("²",), "TARGETs must be numbers of processes"),
        ((__file__,), "Shards need --schema"),
        (("unix:x.sock", "7"), "TARGETs must be numbers of processes, or addresses of servers"),
        (("PID",), "was found in process PID"),
    ],
)
def test_what_is_no_target(arguments: tuple[str, ...], hint: str):
    """PID: the number of this process, which all processes that run tests have to collect under one name."""
    done = doctor(*(argument.replace("PID", str(os.getpid())) for argument in arguments))
    assert done.returncode == 2 and hint.replace("PID", str(os.getpid())) in done.stderr


def test_shards_without_a_training(tmp_path: Path, write_numbered: Callable[[Sequence[int]], list[Path]]):
    write_numbered([3000])
    (tmp_path / "mine.py").write_text(
        "import loaderd\n"
        "def schema():\n"
        "    return loaderd.Schema({'id': loaderd.Int64()}, {'id': loaderd.Array('id')})\n"
    )
    of_shards = ["shards/*.tfrecord", "--schema", "mine:schema", "--workers", "1", "--batch-size", "64"]
    done = doctor(*of_shards, "--step-ms", "1000", "--seconds", "4.5", "--json", folder=tmp_path)
    found = json.loads(done.stdout)
    assert done.returncode == 0 and (found["workers"], found["needed"]) == (1, 1)
    assert found["found"]["records_per_s"] > 1000 and found["found"]["stage_ns"]["parse"] > 0
    done = doctor(*of_shards, "--step-ms", "0.0001", "--seconds", "4.5", folder=tmp_path)
    assert done.returncode == 1 and "and there are 1." in done.stdout and "ns a record" in done.stdout
    done = doctor(*of_shards, "--seconds", "0.5", folder=tmp_path)
    assert done.returncode == 2 and "--seconds 0.5 is too short" in done.stderr
    done = doctor("shards/*.tfrecord", "--schema", "mine:nothing", folder=tmp_path)
    assert done.returncode == 2 and "--schema mine:nothing cannot be loaded" in done.stderr
    for option, value in (("--step-ms", "0"), ("--step-ms", "-1"), ("--seconds", "nan")):
        done = doctor(*of_shards, option, value, folder=tmp_path)
        assert done.returncode == 2 and f"{option} must be a" in done.stderr
