"""The server's Unix socket: whose it is, who may use it, and what becomes of its file."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from loaderd.errors import ServerError
from loaderd.serve.unix_socket import UnixSocket, make_private_folder


def test_it_is_its_owners_alone_and_goes_with_the_server(tmp_path: Path):
    before = os.umask(0)
    try:
        server = UnixSocket(str(tmp_path / "x.sock"))
        assert os.umask(0) == 0, "the umask is what it was"
    finally:
        os.umask(before)
    found = (tmp_path / "x.sock").stat()
    assert stat.S_ISSOCK(found.st_mode) and stat.S_IMODE(found.st_mode) == 0o600
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(server.path)
    server.close()
    server.close()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_another_process_has_locked_ends_the_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Whoever may read the folder, as anybody may read /tmp, can lock it."""
    monkeypatch.setattr("loaderd.serve.unix_socket._LOCKED_S", 0.5)
    server = UnixSocket(str(tmp_path / "x.sock"))
    locked = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(locked, fcntl.LOCK_EX)
    with pytest.raises(ServerError, match=r"another process has locked .* for 0.5 s"):
        UnixSocket(str(tmp_path / "y.sock"))
    server.close()
    os.close(locked)
    UnixSocket(str(tmp_path / "x.sock")).close()


def test_the_socket_of_a_dead_server_is_replaced(tmp_path: Path):
    path = tmp_path / "x.sock"
    code = f"""
import os, signal
from loaderd.serve.unix_socket import UnixSocket
UnixSocket({str(path)!r})
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", code], timeout=30)
    with socket.socket(socket.AF_UNIX) as client, pytest.raises(ConnectionRefusedError):
        client.connect(str(path))
    server = UnixSocket(str(path))
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    server.close()


def test_the_socket_of_a_killed_server_is_replaced_when_what_it_had_started_ends(tmp_path: Path):
    """Which has the socket, too, and may need a moment to end."""
    path = str(tmp_path / "x.sock")
    code = f"""
import os, sys
from loaderd.serve.unix_socket import UnixSocket
server = UnixSocket({path!r})
if os.fork():
    os._exit(0)
print(flush=True)
sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as killed:
        assert killed.stdin is not None and killed.stdout is not None
        killed.stdout.readline()
        killed.wait()
        has_been_told = threading.Event()

        def end_child() -> None:
            has_been_told.set()
            killed.stdin.close()

        threading.Timer(0.5, end_child).start()
        UnixSocket(path).close()
        assert has_been_told.is_set(), "the socket was not free before"


def test_the_socket_of_a_living_server_is_not_and_the_error_says_whose_it_is(tmp_path: Path):
    first = UnixSocket(str(tmp_path / "x.sock"))
    who = rf"process {os.getpid()} of user {os.getuid()}"
    with pytest.raises(ServerError, match=f"{who} listens there already") as caught:
        UnixSocket(first.path)
    assert "--unix" in caught.value.hint
    clients = [socket.socket(socket.AF_UNIX) for _ in range(1000)]
    for client in clients:  # nobody accepts: until the queue is full
        client.setblocking(False)
        if client.connect_ex(first.path):
            break
    else:
        pytest.fail("the queue is never full")
    with pytest.raises(ServerError, match="another process listens there already"):
        UnixSocket(first.path)
    for client in clients:
        client.close()
    first.close()


def test_of_several_that_start_at_once_over_a_dead_one_one_gets_it(tmp_path: Path):
    path = str(tmp_path / "x.sock")
    for _ in range(20):
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(path)
        won: list[UnixSocket] = []
        lost: list[ServerError] = []

        def start(won: list[UnixSocket] = won, lost: list[ServerError] = lost) -> None:
            try:
                won.append(UnixSocket(path))
            except ServerError as error:
                lost.append(error)

        threads = [threading.Thread(target=start) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(won), len(lost)) == (1, 3)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)
        won[0].close()


def test_a_file_that_is_not_ours_any_more_stays(tmp_path: Path):
    path = tmp_path / "x.sock"
    first = UnixSocket(str(path))
    path.unlink()
    second = UnixSocket(str(path))
    first.close()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    second.close()


def test_what_cannot_be_a_socket(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("not to be lost")
    for path, message in (
        (tmp_path / "notes.txt", "is no socket"),
        (tmp_path / "missing" / "x.sock", "No such file or directory"),
        (tmp_path / ("x" * 110), "at most 107 bytes"),
    ):
        with pytest.raises(ServerError, match=message):
            UnixSocket(str(path))
    assert (tmp_path / "notes.txt").read_text() == "not to be lost"


def test_a_folder_in_tmp_must_be_ours(tmp_path: Path):
    folder = tmp_path / "loaderd-0"
    make_private_folder(folder)
    make_private_folder(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o755)
    with pytest.raises(ServerError, match="mode 0700, found drwxr-xr-x"):
        make_private_folder(folder)
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(ServerError, match="found lrwxrwxrwx"):
        make_private_folder(tmp_path / "link")


@pytest.mark.parametrize("method", ["mkdir", "lstat"])
def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str):
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, method, fail)
    with pytest.raises(
        ServerError, match=f"cannot listen in {tmp_path / 'loaderd-0'}: Read-only file system"
    ) as caught:
        make_private_folder(tmp_path / "loaderd-0")
    assert "--unix" in caught.value.hint
