"""``loaderd status`` of a real server: over its socket, on a terminal."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import loaderd
from tests.helpers.serving import COMMAND, MODULE, Server


def status(*arguments: str) -> str:
    done = subprocess.run([COMMAND, "status", *arguments], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_on_this_machine(server: Server):
    address = f"unix://{server.path}"
    with loaderd.connect(address, dataset="valid", batch_size=10, name="trainer") as loader:
        next(iter(loader))
        shown = status(address)
        lines = [line.split() for line in shown.splitlines()]
        assert ["train", "ready", "2", "300", "bits", "float32", "(32,),", "id", "int64", "()"] in lines
        (line,) = (line for line in lines if "trainer" in line and "valid" in line)
        assert line[2:5] == [f"({os.getpid()})", "valid", "independent"] and "lent" in shown
        report = json.loads(status(address, "--json"))
    assert [consumer["name"] for consumer in report["consumers"]] == ["trainer"]
    assert report["limits"]["max_consumers"] == 64


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_that_nobody_reads_it_does_not_mean_that_the_server_does_not_answer(server: Server, words: list[str]):
    command = [COMMAND, "status", f"unix://{server.path}", *words]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.slow
def test_the_doctor_sees_consumers_by_the_server_and_by_its_process(server: Server):
    def doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([COMMAND, "doctor", *arguments], capture_output=True, text=True, timeout=60)

    address = f"unix://{server.path}"
    done = doctor(address)
    assert done.returncode == 2 and "has no consumer that can be diagnosed" in done.stderr
    with loaderd.connect(address, dataset="train", batch_size=10, epochs=None, name="trainer") as loader:
        until_s = time.monotonic() + 6
        for _ in loader:
            time.sleep(0.1)  # so that the loader is quicker, however busy the machine
            if time.monotonic() > until_s:
                break
        assert loader.diagnose().verdict == "the model"
        done = doctor(address)
        assert done.returncode == 0 and "trainer" in done.stdout and "as fast as its model" in done.stdout
        (case,) = json.loads(doctor(str(os.getpid()), "--json").stdout)
        assert case["pid"] == os.getpid(), "the consumer of a server's stream"


_SLOW = """
import time
def slow(ids):
    time.sleep(0.3)
    return ids
fields = {"id": loaderd.Array("id"), "slow": loaderd.Derived(slow, ["id"], (), "int64")}
heavy = loaderd.Dataset("shards/*.tfrecord", loaderd.Schema(schema.features, fields))
"""


@pytest.mark.slow
def test_who_waits_because_of_another_consumer_is_told_so(
    tmp_path: Path, write_numbered_to: Callable[[Path, Sequence[int]], list[Path]]
):
    write_numbered_to(tmp_path / "shards", [100, 200])
    (tmp_path / "sets.py").write_text(MODULE + _SLOW)
    server = Server(tmp_path, "sets:train", "sets:heavy", "--workers", "1")
    server.wait_line("connect with")
    address = f"unix://{server.path}"
    diagnoses: dict[str, str] = {}

    def take(dataset: str) -> None:
        with loaderd.connect(address, dataset=dataset, batch_size=10, epochs=None) as loader:
            until_s = time.monotonic() + 6
            for _ in loader:
                if time.monotonic() > until_s:
                    break
            diagnoses[dataset] = str(loader.diagnose())

    consumers = [threading.Thread(target=take, args=(dataset,)) for dataset in ("train", "heavy")]
    for consumer in consumers:
        consumer.start()
    for consumer in consumers:
        consumer.join()
    server.close()
    assert "busy with other consumers of the server" in diagnoses["train"]
    for found in diagnoses.values():
        assert "Advice: `loaderd serve --workers " in found


@pytest.mark.slow
def test_again_and_again_on_a_terminal(server: Server):
    ours, theirs = pty.openpty()
    command = [COMMAND, "status", f"unix://{server.path}", "--watch"]
    with subprocess.Popen(command, stdout=theirs, stderr=subprocess.PIPE, stdin=theirs, text=True) as process:
        os.close(theirs)
        seen = b""
        while seen.count(b"no consumers") < 2:
            seen += os.read(ours, 4096)
        process.send_signal(signal.SIGINT)
        while True:
            try:
                os.read(ours, 4096)
            except OSError:  # all of it is read
                break
        _, errors = process.communicate(timeout=30)
        assert (process.returncode, errors) == (130, "")
    os.close(ours)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "must be a terminal, for --watch" in done.stderr
