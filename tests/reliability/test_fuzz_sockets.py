"""The fuzz test of the server's sockets, briefly: see ``fuzz_sockets.py`` for the long one."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.reliability import fuzz_sockets


# 20 s of CPU, nearly all of it the readers'. Each kind of message is sent to real sockets in tests/ipc/
# test_untrusted.py, tests/daemon/test_hostile_consumers.py and tests/remote/test_requests.py.
@pytest.mark.slow
def test_what_is_malformed_costs_its_sender_the_connection_and_nobody_else_anything():
    command = [sys.executable, "-m", fuzz_sockets.__name__, "--unix", "80", "--network", "50"]
    command += ["--warm-up", "30"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    figures = json.loads(done.stdout)
    assert done.returncode == 0, figures
    assert sum(figures["messages"].values()) >= 130 and figures["ended"]["Failed"] > 25
    assert min(figures["readers"]["epochs"].values()) >= 2
