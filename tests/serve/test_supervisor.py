"""The supervisor with its processes, as real ones: starts, deaths, reloads, ends. Of both servers."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import stat
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

import loaderd
from loaderd.ipc.channel import ChannelClosed
from loaderd.ipc.messages import Bye, Welcome
from tests.helpers.serving import MODULE, Server, handles_of, receive, wait_ends, wait_until

Start = Callable[..., Server]


SERVES = {False: "memory:", True: "is ready"}
"""What a server says that serves; the keys: whether it is on the network."""
both_servers = pytest.mark.parametrize("network", [False, True], ids=["unix", "network"])


def page(url: str, name: str = "readyz") -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url.replace("readyz", name), timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_what_it_says_and_how_it_ends(start: Start, tmp_path: Path):
    server = start("sets:train", "sets:valid")
    line = server.wait_line("connect with loaderd")
    assert line == f'connect with loaderd.connect("unix://{server.path}", dataset="train", batch_size=512)'
    server.wait_line("memory: 0 MiB for consumers now, 2 workers; ")
    said = "\n".join(server.said)  # either data set may be ready first
    assert "train: 300 records in 2 shards; fields: bits float32 (32,), id int64 ()" in said
    assert "train: a consumer with batches of 512 takes " in said and "valid: 100 records in 1 shards" in said
    assert stat.S_IMODE(os.stat(server.path).st_mode) == 0o600
    assert [each["name"] for each in server.report()["datasets"]] == ["train", "valid"]
    wait_until(lambda: len(server.family()) == 5)  # a worker may be the later one
    family = handles_of(server.family())
    with server.connected("train") as consumer:
        assert isinstance(receive(consumer)[0], Welcome)
        server.process.send_signal(signal.SIGTERM)
        assert receive(consumer) == [Bye("the server ends (SIGTERM)")]
        with pytest.raises(ChannelClosed):
            receive(consumer)
    assert server.wait_end() == 0
    assert server.said[-1] == "the server has ended"
    wait_ends(family)
    assert not os.path.exists(server.path)


def test_a_daemon_that_dies_is_replaced_and_consumers_wait_for_it(start: Start):
    server = start()
    server.wait_line("memory:")
    for _ in range(2):
        before = server.daemon
        workers = handles_of([pid for pid in server.family()[1:] if pid != before])
        os.kill(before, signal.SIGKILL)
        assert server.daemon != before, "the connection waited in the queue of the socket"
        server.wait_line(f"daemon {before} was killed by SIGKILL; another daemon starts in")
        server.wait_line(f"daemon {server.daemon} serves now")
        wait_ends(workers)
    assert server.process.poll() is None


@pytest.mark.slow
def test_a_daemon_that_is_replaced_leaves_out_shards_that_came_later(start: Start, tmp_path: Path, write_numbered):
    """One that is reloaded has them, and so has one that cannot have the same data."""
    mix = "loaderd.Mix({'a': 0.5, 'b': 0.5}, {'a': grows, 'b': train}, epoch_records=300)"
    (tmp_path / "sets.py").write_text(
        f"{MODULE}\ngrows = loaderd.Dataset('grows/*.tfrecord', schema, refresh='epoch')\nmixed = {mix}\n"
    )
    write_numbered([100], "grows")
    added = [tmp_path / "shards" / f"{number}.tfrecord" for number in (7, 8, 9)]

    def add_and_kill() -> None:
        write_numbered([50], "later")[0].rename(added.pop())
        os.kill(server.daemon, signal.SIGKILL)
        server.wait_line("serves now")

    server = start("sets:train", "sets:mixed")
    server.wait_line("memory:")
    address = f"unix://{server.path}"
    with contextlib.ExitStack() as stack:
        trainings = []
        for name in ("mixed", "train"):
            loader = loaderd.connect(address, name, batch_size=10, epochs=None)
            trainings.append(iter(stack.enter_context(loader)))
        found = [next(training)["id"].tolist() for training in trainings]
        add_and_kill()
        for training, ids in zip(trainings, found, strict=True):
            for _ in range(149):  # five epochs, more than is made ahead
                ids += next(training)["id"].tolist()
    assert all(sorted(found[1][first : first + 300]) == list(range(300)) for first in range(0, 1500, 300))
    server.process.send_signal(signal.SIGHUP)
    server.wait_line("train: 350 records in 3 shards")
    for records in (350, 250):  # then one is gone that the daemon before had
        add_and_kill()
        with loaderd.connect(address, "train", batch_size=10) as loader:
            assert loader.statistics().num_records == records
        (tmp_path / "shards" / "001.tfrecord").unlink(missing_ok=True)


@both_servers
def test_a_server_without_its_supervisor_ends(start: Start, network: bool):
    server = start(network=network)
    server.wait_line(SERVES[network])
    family = handles_of(server.family())
    server.process.send_signal(signal.SIGKILL)
    wait_ends(family)


@pytest.mark.parametrize(
    ("target", "error", "network"),
    [
        ("nowhere:train", "cannot import nowhere:train: ModuleNotFoundError", True),
        ("sets:missing", "cannot serve sets:missing: module 'sets' has no attribute 'missing'", False),
        pytest.param(
            "sets:schema", "must be a loaderd.Dataset, Mix or Concat, got Schema", False, marks=pytest.mark.slow
        ),
    ],
)
def test_what_cannot_be_served(start: Start, target: str, error: str, network: bool):
    server = start(target, network=network)
    assert error in server.wait_line("the server gives up: ")
    assert server.wait_end() == 1
    assert not [line for line in server.said if "another" in line], "it would say the same again"
    assert not [line for line in server.said if "connect with" in line]
    assert not os.path.exists(server.path)


@pytest.mark.slow
def test_three_starts_in_vain_are_the_end(start: Start, tmp_path: Path):
    (tmp_path / "sets.py").write_text(MODULE + "import os\nif os.path.exists('crash'): os.abort()\n")
    server = start()
    server.wait_line("memory:")
    (tmp_path / "crash").touch()
    with server.connected("train") as consumer:
        assert isinstance(receive(consumer)[0], Welcome)
        os.kill(server.daemon, signal.SIGKILL)
        with pytest.raises(ChannelClosed):
            receive(consumer)
    assert server.wait_end() == 1
    assert [line.split()[-1] for line in server.said if "SIGABRT" in line and "another" in line] == ["s", "s"]
    assert [line for line in server.said if line.startswith("the server gives up: daemon ")]


def test_a_reload_imports_anew_and_the_old_daemon_serves_its_consumers_to_the_end(start: Start, tmp_path: Path):
    server = start()
    server.wait_line("memory:")
    first = server.daemon
    with loaderd.connect(f"unix://{server.path}", dataset="train", batch_size=10, epochs=2) as loader:
        batches = iter(loader)
        seen = list(next(batches)["id"])
        (tmp_path / "sets.py").write_text(MODULE.replace("shards/*", "shards/001"))
        server.process.send_signal(signal.SIGHUP)
        server.wait_line("train: 200 records in 1 shards")
        wait_until(lambda: server.daemon != first)  # which may have been the faster one to accept us
        second = server.daemon
        seen += [number for batch in batches for number in batch["id"]]
        assert sorted(seen) == sorted(2 * list(range(300))), "it goes on with what it began with"
        assert loader.statistics().daemon_restarts == 0
        with loaderd.connect(f"unix://{server.path}", dataset="train", batch_size=10) as another:
            assert another.statistics().num_records == 200
        assert first in server.family()
    server.wait_line(f"daemon {first}, which was replaced, ended with status 0")
    assert server.daemon == second


def test_a_reload_that_fails_changes_nothing(start: Start, tmp_path: Path):
    server = start()
    server.wait_line("memory:")
    before = server.daemon
    (tmp_path / "sets.py").write_text("this is no Python")
    server.process.send_signal(signal.SIGHUP)
    assert "SyntaxError" in server.wait_line("reload failed, the server goes on as it was: ")
    assert server.daemon == before
    (tmp_path / "sets.py").write_text(MODULE)
    server.process.send_signal(signal.SIGHUP)
    server.wait_line("serves now")
    wait_until(lambda: server.daemon != before)


@both_servers
def test_a_reload_whose_import_hangs_makes_room_for_the_next_and_for_the_end(
    start: Start, tmp_path: Path, network: bool
):
    server = start(network=network, arguments=["--grace", "1000"])
    server.wait_line(SERVES[network])

    def reload_and_hang() -> None:
        (tmp_path / "began").unlink(missing_ok=True)
        (tmp_path / "sets.py").write_text("import pathlib, time\npathlib.Path('began').touch()\ntime.sleep(1000)")
        server.process.send_signal(signal.SIGHUP)
        wait_until((tmp_path / "began").exists)

    reload_and_hang()
    (tmp_path / "sets.py").write_text(MODULE)
    server.process.send_signal(signal.SIGHUP)
    server.wait_line("reloaded: ")
    reload_and_hang()
    server.process.send_signal(signal.SIGTERM)
    assert server.wait_end() == 0


@pytest.mark.slow
@both_servers
@pytest.mark.parametrize("signals", [1, 2])
def test_a_process_that_does_not_end_is_killed(start: Start, signals: int, network: bool):
    server = start(network=network, arguments=["--grace", "0.3" if signals == 1 else "1000"])
    server.wait_line(SERVES[network])
    family = handles_of(server.family())
    os.kill(server.processes()[0] if network else server.daemon, signal.SIGSTOP)
    for _ in range(signals):
        server.process.send_signal(signal.SIGINT)
        server.wait_line("SIGINT")
    assert server.wait_end() == 0
    wait_ends(family)


def test_its_health(start: Start):
    server = start(arguments=["--health", "127.0.0.1:0"])
    url = server.wait_line("health: ").split()[1]
    server.wait_line("memory:")
    wait_until(lambda: page(url) == (200, "ok\n"))
    daemon = server.daemon
    with loaderd.connect(f"unix://{server.path}", dataset="train", batch_size=10, name="trainer") as loader:
        assert len(list(loader)) == 30
        counted = 'loaderd_records_total{consumer="trainer",dataset="train"} 300.0\n'
        wait_until(lambda: counted in page(url, "metrics")[1])
        assert "\nloaderd_consumers{" in page(url, "metrics")[1] and "loaderd_ready 1.0\n" in page(url, "metrics")[1]
    os.kill(daemon, signal.SIGSTOP)
    wait_until(lambda: page(url)[0] == 503)
    assert page(url)[1].startswith("the daemon has said nothing for ") and page(url, "livez") == (200, "ok\n")
    os.kill(daemon, signal.SIGKILL)
    server.wait_line("serves now")
    wait_until(lambda: page(url)[0] == 200)
    found = page(url, "metrics")[1]
    assert '\nloaderd_restarts_total{process="daemon"} 1.0\n' in found
    assert counted in found, "counters never fall"
    assert page(url, "nothing") == (404, "there is /livez, /readyz, /metrics\n")
    port = int(url.rsplit(":", 1)[1].partition("/")[0])
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
    assert page(url)[0] == 200, "who says nothing keeps nobody out"
    for client in silent[:50]:
        client.settimeout(30)
        with contextlib.suppress(ConnectionError):
            assert client.recv(1) == b""
    for client in silent:
        client.close()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        other = start(arguments=["--health", f"127.0.0.1:{taken.getsockname()[1]}"], unix=f"{server.path}2")
        assert other.wait_end() == 2 and "--health cannot listen at" in "".join(other.said)


def test_a_reload_that_cannot_begin_because_too_many_files_are_open(start: Start):
    server = start()
    server.wait_line("memory:")
    pid, before = server.process.pid, resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, before[1]))
    server.process.send_signal(signal.SIGHUP)
    said = server.wait_line("reload failed, the server goes on as it was: cannot start a process")
    assert "Too many open files" in said and "ulimit -n" in said
    resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
    server.process.send_signal(signal.SIGHUP)
    server.wait_line("reloaded: ")


def test_a_second_server_at_the_same_place_is_refused(start: Start):
    server = start()
    server.wait_line("memory:")
    second = start()
    assert second.wait_end() == 2
    who = f"process {server.process.pid} of user {os.getuid()}"
    assert f"{who} listens there already" in "".join(second.said)
    assert server.report()["pid"] in server.family()


@pytest.mark.slow
def test_systemd_is_told(start: Start, tmp_path: Path):
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(60)
        server = start(NOTIFY_SOCKET=str(tmp_path / "notify"))
        assert systemd.recv(100) == b"READY=1"
        server.process.send_signal(signal.SIGHUP)
        assert [systemd.recv(100), systemd.recv(100)] == [b"RELOADING=1", b"READY=1"]
        server.process.send_signal(signal.SIGTERM)
        assert systemd.recv(100) == b"STOPPING=1"
        assert server.wait_end() == 0
