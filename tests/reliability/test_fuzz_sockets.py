"""The fuzz test of the server's sockets, briefly: see ``fuzz_sockets.py`` for the long one."""

from __future__ import annotations

import json
import subprocess
import sys

import fuzz_sockets
import pytest


@pytest.mark.timeout(300)  # a minute, most of it for the slow ones to be ended; but on a busy machine
def test_what_is_malformed_costs_its_sender_the_connection_and_nobody_else_anything():
    command = [sys.executable, fuzz_sockets.__file__, "--unix", "300", "--network", "200"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    figures = json.loads(done.stdout)
    assert done.returncode == 0, figures
    assert sum(figures["messages"].values()) >= 500 and figures["ended"]["Failed"] > 100
    assert min(figures["readers"]["epochs"].values()) >= 2
