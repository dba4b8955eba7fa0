"""``loaderd status`` of a real server: over its socket, on a terminal."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import time

import pytest

import loaderd
from tests.helpers.serving import COMMAND, Server


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
