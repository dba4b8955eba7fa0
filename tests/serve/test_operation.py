"""What an operator relies on: exact counters, reasons, readiness, a watchdog, clean logs. Of real processes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import loaderd
from loaderd.client.connect import ask_status
from loaderd.errors import LoaderdError, ServerError, install_hint
from loaderd.processes import name_of
from tests.helpers.serving import COMMAND, MODULE, Server, handles_of, wait_ends, wait_until

Start = Callable[..., Server]
HEALTH = ["--health", "127.0.0.1:0"]


@pytest.fixture
def start(tmp_path: Path, write_numbered: Callable[[Sequence[int]], list[Path]]) -> Iterator[Start]:
    """Starts a server of 2 workers in a folder with the module ``sets`` and its shards, and waits until it serves."""
    write_numbered([100, 200])
    (tmp_path / "sets.py").write_text(MODULE)
    servers: list[Server] = []

    def start(*arguments: str, until: str = "connect with", **environment: Any) -> Server:
        servers.append(Server(tmp_path, "sets:train", "sets:valid", "--workers", "2", *arguments, **environment))
        servers[-1].wait_line(until)
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def page(server: Server, name: str) -> tuple[int, str]:
    (line,) = (line for line in server.said if line.startswith("health: "))
    try:
        with urllib.request.urlopen(line.split()[1].replace("readyz", name), timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def metric(server: Server, name: str) -> float:
    """The sum over the labels."""
    lines = page(server, "metrics")[1].splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


def connect(server: Server, **options: Any) -> loaderd.Loader:
    return loaderd.connect(f"unix://{server.path}", "train", **{"batch_size": 10, **options})


# ---------------------------------------------------------------------------------------------- counters


def test_no_record_of_a_short_life_is_missing_in_the_counters(start: Start):
    server = start(*HEALTH)
    for _ in range(20):
        with connect(server) as loader:
            assert sum(batch.num_records for batch in loader) == 300
    wait_until(lambda: metric(server, "loaderd_consumers") == 0)
    wait_until(lambda: metric(server, "loaderd_records_total") == 6000)
    assert metric(server, "loaderd_batches_total") == 600


# ------------------------------------------------------------------------------------------------- idle


def test_who_leaves_its_batches_untaken_is_sent_away(start: Start):
    server = start("--idle-timeout", "1")
    with connect(server) as idle:
        next(iter(idle))
        server.wait_line("left its batches untaken")


# ------------------------------------------------------------------------------------- failed data sets


@pytest.mark.slow
def test_a_data_set_that_failed_is_tried_again_and_keeps_nobody_from_the_others(start: Start, tmp_path: Path):
    shard = tmp_path / "shards" / "000.tfrecord"
    shard.rename(tmp_path / "away")
    server = start(*HEALTH)
    server.wait_line("valid: failed: ")
    wait_until(lambda: page(server, "readyz")[0] == 200)
    assert page(server, "livez") == (200, "ok\n")
    with connect(server) as loader:
        assert sum(batch.num_records for batch in loader) == 200
    (tmp_path / "away").rename(shard)
    server.wait_line("valid: 100 records in 1 shards")
    with loaderd.connect(f"unix://{server.path}", "valid", batch_size=10) as loader:
        assert sum(batch.num_records for batch in loader) == 100
    assert page(server, "readyz")[0] == 200


# --------------------------------------------------------------------------------------------- watchdog


STARTING = """
def starting(numbers):
    import subprocess
    subprocess.Popen(["sleep", "1000"])  # nobody waits for it
    return numbers

fields = {**schema.fields, "started": loaderd.Derived(starting, "id", dtype="int64")}
train = loaderd.Dataset("shards/*.tfrecord", loaderd.Schema(schema.features, fields))
"""


@pytest.mark.one_variant
@pytest.mark.parametrize("ends", ["SIGTERM", "SIGKILL", "a daemon alone"])
def test_programs_that_a_field_started_end_with_the_server(tmp_path: Path, start: Start, ends: str):
    (tmp_path / "sets.py").write_text(MODULE + STARTING)
    server = start()
    with loaderd.connect(f"unix://{server.path}", "train", batch_size=10) as loader:
        next(iter(loader))
        programs = [pid for pid in server.family() if name_of(pid) == "sleep"]
    handles = handles_of(programs)
    assert handles
    if ends == "a daemon alone":
        os.kill(server.daemon, signal.SIGKILL)
    else:
        server.process.send_signal(getattr(signal, ends))
    wait_ends(handles)


def test_a_supervisor_goes_on_where_a_daemon_was_to_be_asked(start: Start):
    server = start()
    server.process.send_signal(signal.SIGUSR1)
    server.process.send_signal(signal.SIGTERM)
    server.wait_line("the server ends (SIGTERM)")


@pytest.mark.slow
def test_a_process_that_hangs_is_replaced(start: Start, tmp_path: Path):
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(60)
        environment = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "3000000"}
        server = start(*HEALTH, "--watchdog", "2", **environment)
        while systemd.recv(100) != b"WATCHDOG=1":
            pass
        victim = server.daemon
        os.kill(victim, signal.SIGSTOP)
        server.wait_line(f"daemon {victim} has said nothing for ")
        server.wait_line("serves now")
        wait_until(lambda: page(server, "readyz")[0] == 200)


def test_fewer_windows_where_memory_has_a_limit(start: Start):
    """Twelve slots of 4 KiB and three windows of 8 KiB would be 72 KiB; with two it is 64, in the same order."""
    server = start("--max-memory", "70kB", "--workers", "4")
    with connect(server, held_batches=4) as loader:
        assert loader.statistics().window_bytes == 2 * 8192
        assert sum(batch.num_records for batch in loader) == 300


def test_memory_of_a_consumer_has_a_limit(start: Start):
    server = start("--max-memory", "1MiB")
    with connect(server) as loader:
        assert sum(batch.num_records for batch in loader) == 300
    with pytest.raises(ServerError, match=r"this would take .* of windows and batches, and may take 1 MiB"):
        connect(server, batch_size=300, held_batches=60)
    for absurd in (10**12, 2**62, 10**30):
        with pytest.raises(LoaderdError, match=r"batch_size must be|this would take"):
            connect(server, batch_size=absurd)
    with connect(server) as loader:
        assert sum(batch.num_records for batch in loader) == 300


# ---------------------------------------------------------------------------------------------- the log


@pytest.mark.slow
def test_an_end_and_a_crash_are_told_apart(server: Server):
    program = (
        "import os, sys, loaderd\nloader = loaderd.connect(sys.argv[1], 'train', batch_size=10, name=sys.argv[2])\n"
    )
    for name, end, said in [
        ("orderly", "", "has ended"),
        ("left open", "it = iter(loader); next(it)", "has ended"),
        ("raising", "raise ValueError", "has ended"),
        ("crashed", "os._exit(1)", "is gone without a word"),
        ("killed", "os.kill(os.getpid(), 9)", "is gone without a word"),
    ]:
        command = [sys.executable, "-c", program + end, f"unix://{server.path}", name]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as consumer:
            pass
        assert said in server.wait_line(f"{name} (process {consumer.pid}) {said.split()[0]}")


def test_a_log_that_cannot_be_written_ends_nothing(tmp_path: Path, start: Start):
    """A full disk, or a reader of the log that is gone."""
    path = tmp_path / "full.sock"
    command = [COMMAND, "serve", "sets:train", "--unix", str(path), "--workers", "1", "--log-format", "json"]

    def is_up() -> bool:
        with contextlib.suppress(ServerError):
            return bool(ask_status(f"unix://{path}")["pid"])
        return False

    with open("/dev/full", "w") as full, subprocess.Popen(command, cwd=tmp_path, stderr=full) as server:
        try:
            wait_until(is_up)
            for _ in range(3):  # the daemon logs the end of each
                with loaderd.connect(f"unix://{path}", "train", batch_size=10, reconnect_timeout=0) as loader:
                    assert sum(batch.num_records for batch in loader) == 300
            assert is_up() and server.poll() is None
            server.send_signal(signal.SIGTERM)
            server.wait(60)
        finally:
            server.kill()
    assert not path.exists()


@pytest.mark.one_variant
@pytest.mark.parametrize("log_format", ["lines", "json"])
def test_what_a_module_prints_is_where_it_was_printed(tmp_path: Path, start: Start, log_format: str):
    """As without a server; the log is on standard error."""
    (tmp_path / "sets.py").write_text("import os\nprint('a print')\nos.system('echo of a child')\n" + MODULE)
    arguments = ["--unix", str(tmp_path / "lines.sock"), "--workers", "1", "--log-format", log_format]
    command = [COMMAND, "serve", "sets:train", *arguments]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        while "memory:" not in (line := server.stderr.readline()):
            assert line.startswith("{") == (log_format == "json")
        os.kill(server.pid, signal.SIGTERM)
        out, lines = server.communicate(timeout=60)
    assert out == "a print\nof a child\n" and server.returncode == 0
    assert "the server has ended" in lines.splitlines()[-1]


def test_without_what_health_pages_need_it_says_what_to_install(start: Start):
    program = "import runpy, sys; sys.modules['uvicorn'] = None; sys.argv = sys.argv[1:]; "
    program += "runpy.run_path(sys.argv[0], run_name='__main__')"
    server = start(*HEALTH, through=[sys.executable, "-c", program], until="--health needs uvicorn")
    assert server.wait_end() == 2 and install_hint("server") in "".join(server.said)
    assert not os.path.exists(server.path)
