"""The fuzz test of the server's sockets, briefly: see ``fuzz_sockets.py`` for the long one."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.reliability import fuzz_sockets


# 20 s of CPU, nearly all of it the readers'. Each kind of message is sent to real sockets in tests/ipc/
# test_untrusted.py, tests/daemon/test_server.py and, with a consumer beside, tests/remote/test_hostile.py.
@pytest.mark.slow
def test_what_is_malformed_costs_its_sender_the_connection_and_nobody_else_anything():
    """Without those who say too little, for they stay a quarter of a minute: test_hostile.py has them."""
    command = [sys.executable, "-m", fuzz_sockets.__name__, "--unix", "80", "--network", "50"]
    command += ["--warm-up", "30", "--slow", "0"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    figures = json.loads(done.stdout)
    assert done.returncode == 0, figures
    assert sum(figures["messages"].values()) >= 130 and figures["ended"]["Failed"] > 25
    assert min(figures["readers"]["epochs"].values()) >= 2


def test_what_goes_wrong_in_the_warm_up_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of a server, readers and fuzzers that are none."""
    readers = SimpleNamespace(
        stdin=io.StringIO(),
        stdout=io.StringIO("all read\n"),
        communicate=lambda _: ('{"wrong": []}', None),
        kill=lambda: None,
        wait=lambda: None,
    )

    class Fuzzer:
        def __init__(self, served: object, num_slow: int, rng: object, figures: fuzz_sockets.Figures) -> None:
            self._figures = figures

        def run(self, count: int) -> None:
            self._figures.messages["one"] += count
            if count == 7:
                self._figures.wrong.append("no answer")

    served = SimpleNamespace(unix="socket", port=1, close=lambda: None)
    monkeypatch.setattr(fuzz_sockets, "Served", lambda _: served)
    monkeypatch.setattr(fuzz_sockets.subprocess, "Popen", lambda *_, **__: readers)
    monkeypatch.setattr(fuzz_sockets, "least", lambda *_: {})
    for name in ("UnixFuzzer", "NetworkFuzzer"):
        monkeypatch.setattr(fuzz_sockets, name, Fuzzer)
    figures = fuzz_sockets.fuzz(tmp_path, 7, 2, 1, 0, seed=0)
    assert figures.wrong == ["no answer"] * 2
    assert figures.messages["one"] == 3, "those of the warm-up are not counted"
