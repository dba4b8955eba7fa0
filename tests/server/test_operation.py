"""What an operator relies on: exact counters, reasons, readiness, a watchdog, clean logs. Of real processes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
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
from loaderd.errors import BusyError, LoaderdError, ServerError
from loaderd.remote.address import network_address
from tests.helpers.serving import COMMAND, MODULE, Server, handles_of, wait_ends, wait_until
from tests.reliability.processes import name_of

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


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, write_numbered_to: Callable[[Path, Sequence[int]], list[Path]]
) -> Iterator[Server]:
    """One for the tests that do no harm to it."""
    folder = tmp_path_factory.mktemp("server")
    write_numbered_to(folder / "shards", [100, 200])
    (folder / "sets.py").write_text(MODULE)
    started = Server(folder, "sets:train", "sets:valid", "--workers", "2")
    started.wait_line("connect with")
    yield started
    started.close()


def page(server: Server, name: str) -> tuple[int, str]:
    (line,) = (line for line in server.said if line.startswith("health: "))
    try:
        with urllib.request.urlopen(line.split()[1].replace("healthz", name), timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def metric(server: Server, name: str) -> float:
    """The sum over the labels."""
    lines = page(server, "metrics")[1].splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


def connect(server: Server, **options: Any) -> loaderd.ServedLoader:
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


@pytest.mark.slow
def test_counters_of_the_network(start: Start):
    server = start(*HEALTH, "--listen", "127.0.0.1:0", until="grpc://")
    address = server.said[-1].split('"')[1]
    for _ in range(2):
        with loaderd.connect(address, "train", batch_size=10, workers=1, name="trainer") as loader:
            assert sum(batch.num_records for batch in loader) == 300
    server.wait_line("trainer (ipv4:127.0.0.1) reads train")
    wait_until(lambda: metric(server, "loaderd_remote_records_total") >= 600)
    text = page(server, "metrics")[1]
    assert 'loaderd_remote_requests_total{consumer="trainer",dataset="train"}' in text
    assert metric(server, "loaderd_remote_cache_hits_total") == metric(server, "loaderd_remote_requests_total") / 2


# ------------------------------------------------------------------------------------------------ groups


@pytest.mark.parametrize(
    ("first", "second", "error", "why"),
    [
        (
            {"sharing": "mirrored", "consumers": 2},
            {"sharing": "mirrored", "consumers": 3},
            ServerError,
            "consumers 3",
        ),
        (
            {"sharing": "mirrored"},
            {"sharing": "mirrored", "batch_size": 20},
            ServerError,
            "batch_size 20 instead of 10",
        ),
        ({"shard": (0, 2)}, {"shard": (1, 3)}, ServerError, "shard"),
        ({"shard": (0, 2)}, {"shard": (0, 2)}, BusyError, r"a consumer with shard=\(0, 2\) already"),
        ({"shard": (0, 2)}, {"shard": (1, 2), "epochs": 2}, ServerError, "epochs 2 instead of 1"),
    ],
)
def test_who_does_not_fit_is_refused_with_the_reason(
    server: Server, first: dict[str, Any], second: dict[str, Any], error: type[LoaderdError], why: str
):
    with connect(server, **first):
        with pytest.raises(error, match=why):
            connect(server, **second)
        connect(server, **{**second, "group": "another"}).close()


def test_a_place_is_free_again(server: Server):
    for _ in range(3):
        with connect(server, shard=(0, 2)) as loader:
            assert sum(batch.num_records for batch in loader) == 150


# ------------------------------------------------------------------------------------------------- idle


@pytest.mark.slow
def test_who_waits_for_another_is_not_idle(start: Start):
    server = start("--idle-timeout", "3")
    with connect(server, sharing="mirrored", consumers=2, reconnect_timeout=0) as waiting:
        program = "import sys, loaderd, time\ntime.sleep(6)\n"
        program += (
            "with loaderd.connect(sys.argv[1], 'train', batch_size=10, sharing='mirrored', consumers=2) as loader:"
        )
        program += "\n    print(sum(batch.num_records for batch in loader))\n"
        command = [sys.executable, "-c", program, f"unix://{server.path}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
            assert sum(batch.num_records for batch in waiting) == 300
            assert other.communicate(timeout=60)[0] == "300\n"


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
    text = page(server, "readyz")[1]
    assert list(json.loads(text)["not_ready"]) == ["valid"]
    assert page(server, "healthz")[0] == 503 and page(server, "livez") == (200, "ok\n")
    with connect(server) as loader:
        assert sum(batch.num_records for batch in loader) == 200
    (tmp_path / "away").rename(shard)
    server.wait_line("valid: 100 records in 1 shards")
    with loaderd.connect(f"unix://{server.path}", "valid", batch_size=10) as loader:
        assert sum(batch.num_records for batch in loader) == 100
    wait_until(lambda: page(server, "healthz")[0] == 200)


# --------------------------------------------------------------------------------------------- watchdog


@pytest.mark.slow
@pytest.mark.parametrize("process", ["daemon", "gateway"])
def test_a_process_that_hangs_is_replaced(start: Start, tmp_path: Path, process: str):
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(60)
        environment = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "3000000"}
        options = [*HEALTH, "--watchdog", "2", "--listen", "127.0.0.1:0"]
        server = start(*options, until="grpc://", **environment)
        while systemd.recv(100) != b"WATCHDOG=1":
            pass
        called = {"daemon": "loaderd-server", "gateway": "loaderd-gateway"}[process]
        (victim,) = (pid for pid in server.family() if name_of(pid) == called)
        os.kill(victim, signal.SIGSTOP)
        server.wait_line(f"{process} {victim} has said nothing for ")
        server.wait_line("serves now")
        wait_until(lambda: page(server, "readyz")[0] == 200)


def test_nothing_outlives_the_supervisor(start: Start):
    server = start("--listen", "127.0.0.1:0", until="grpc://")
    # The supervisor, the daemon, the process that forks, 2 workers, the gateway, 2 makers.
    wait_until(lambda: len(server.family()) == 8)
    handles = handles_of(server.family())
    server.process.send_signal(signal.SIGKILL)
    wait_ends(handles)


# ------------------------------------------------------------------------------------- what it is told


def certificate(folder: Path, name: str, *days: str) -> list[str]:
    if shutil.which("openssl") is None:
        pytest.skip("certificates are made with the openssl command, which is not here")
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=localhost"
    files = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", f"{name}.key", "-out", f"{name}.pem"]
    subprocess.run([*make.split(), *days, *files], cwd=folder, check=True, capture_output=True)
    return ["--tls-cert", f"{name}.pem", "--tls-key", f"{name}.key"]


def test_wrong_certificates_are_named_before_anything_starts(start: Start, tmp_path: Path):
    first, second = certificate(tmp_path, "first"), certificate(tmp_path, "second")
    (tmp_path / "garbage").write_text("no PEM")
    listen = ["--listen", "127.0.0.1:0"]
    for options, why in [
        ([*first[:2], *second[2:]], "the key second.key does not belong to the certificate first.pem"),
        ([*first[:2], "--tls-key", "garbage"], "garbage must be a private key without a passphrase, PEM"),
        (["--tls-cert", "garbage", *first[2:]], "garbage cannot be read as a PEM certificate"),
        ([*first, "--tls-client-ca", "garbage"], "garbage cannot be read as a PEM certificate"),
    ]:
        server = start(*listen, *options, until=why)
        assert server.wait_end() == 2


@pytest.mark.slow
def test_what_is_weak_or_expires_is_warned_of_and_taken_anew_on_sighup(start: Start, tmp_path: Path):
    options = certificate(tmp_path, "server", "-days", "1")
    (tmp_path / "token").write_text("short")
    (tmp_path / "token").chmod(0o600)
    server = start("--listen", "127.0.0.1:0", *options, "--token-file", "token", until="the token has 5 characters")
    server.wait_line("server.pem expires in 2")
    address = server.wait_line("grpc+tls://").split('"')[1]
    tls = loaderd.TLS(ca=tmp_path / "server.pem")
    assert ask_status(address, token="short", tls=tls)["pid"]
    with pytest.raises(ServerError, match="refuses the token"):
        ask_status(address, token="wrong", tls=tls)
    server.wait_line("a call from ipv4:127.0.0.1 was refused: the token is missing, or wrong; 1 calls were refused")
    (tmp_path / "token").write_text("a-longer-one-than-before")
    certificate(tmp_path, "server")
    server.process.send_signal(signal.SIGHUP)
    server.wait_line("reloaded")
    server.wait_line("grpc+tls://")
    assert ask_status(address, token="a-longer-one-than-before", tls=tls)["pid"]
    with pytest.raises(ServerError, match="refuses the token"):
        ask_status(address, token="short", tls=tls)
    (tmp_path / "server.key").write_text("garbage")
    server.process.send_signal(signal.SIGHUP)
    server.wait_line("reload failed, the server goes on as it was: server.key must be a private key")
    assert ask_status(address, token="a-longer-one-than-before", tls=tls)["pid"]


@pytest.mark.slow
def test_a_reload_that_fails_changes_nothing(start: Start, tmp_path: Path):
    (tmp_path / "token").write_text("the-token-of-the-start")
    (tmp_path / "token").chmod(0o600)
    server = start("--listen", "127.0.0.1:0", "--token-file", "token", until="grpc://")
    address = server.said[-1].split('"')[1]
    (tmp_path / "token").write_text("the-token-of-later")
    (tmp_path / "sets.py").write_text("no Python")
    server.process.send_signal(signal.SIGHUP)
    server.wait_line("reload failed, the server goes on as it was: cannot import sets")
    (gateway,) = (pid for pid in server.family() if name_of(pid) == "loaderd-gateway")
    os.kill(gateway, signal.SIGKILL)
    server.wait_line("serves now")
    assert ask_status(address, token="the-token-of-the-start")["pid"]


@pytest.mark.slow
def test_a_failed_handshake_is_counted_and_in_the_log(start: Start, tmp_path: Path):
    server = start(*HEALTH, "--listen", "127.0.0.1:0", *certificate(tmp_path, "server"), until="grpc+tls://")
    port = network_address(server.said[-1].split('"')[1])[1]
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", port)) as caller:
            caller.sendall(b"GET / HTTP/1.0\r\n\r\n")
            while caller.recv(1000):
                pass
    server.wait_line("a call from somewhere was refused: the TLS handshake failed: http request; 1 calls")
    wait_until(lambda: 'loaderd_refused_total{way="network"} 3.0' in page(server, "metrics")[1])
    server.process.send_signal(signal.SIGTERM)
    assert server.wait_end() == 0
    assert not [line for line in server.said if "Handshake failed" in line]


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


def test_what_a_module_prints_does_not_break_the_log(tmp_path: Path, start: Start):
    noise = "import os, sys\nprint('a print')\nprint('an error', file=sys.stderr)\nos.system('echo of a child')\n"
    (tmp_path / "sets.py").write_text(noise + MODULE)
    server = start(until="memory:")
    server.process.send_signal(signal.SIGTERM)
    assert server.wait_end() == 0
    for text in ("a print", "an error", "of a child"):
        assert f"daemon printed: {text}" in server.said
    assert not [line for line in server.said if line.endswith("\n")], "a line that was no JSON"


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


def test_lines_for_people_are_no_json(tmp_path: Path, start: Start):
    """And what a module prints is where it was printed, as without a server."""
    (tmp_path / "sets.py").write_text("print('a print')\n" + MODULE)
    command = [COMMAND, "serve", "sets:train", "--unix", str(tmp_path / "lines.sock"), "--workers", "1"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        while "memory:" not in server.stderr.readline():
            pass
        os.kill(server.pid, signal.SIGTERM)
        out, lines = server.communicate(timeout=60)
    assert out == "a print\n" and lines.splitlines()[-1].endswith("the server has ended") and server.returncode == 0


def test_without_prometheus_client_the_page_of_metrics_says_what_to_install(start: Start):
    program = "import runpy, sys; sys.modules['prometheus_client'] = None; sys.argv = sys.argv[1:]; "
    program += "runpy.run_path(sys.argv[0], run_name='__main__')"
    server = start(*HEALTH, through=[sys.executable, "-c", program])
    assert page(server, "livez")[0] == 200
    assert page(server, "metrics") == (501, "/metrics needs prometheus-client: pip install 'loaderd[metrics]'\n")
