"""Processes of ours: what they see, and that they end when the one that started them does."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from loaderd.errors import DaemonError
from loaderd.protocol.process import how_it_ended
from loaderd.protocol.starting import start_process

Child = tuple["subprocess.Popen[bytes]", socket.socket]
Start = Callable[[str, str], Child]

_HEAD = """
import json, os, select, signal, sys
from loaderd.protocol.process import die_with_parent, enter_process
from loaderd.protocol.starting import start_process
"""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts a process that runs ``main()`` of a module with this text."""
    children: list[Child] = []
    monkeypatch.syspath_prepend(str(tmp_path))

    def start(name: str, text: str) -> Child:
        (tmp_path / f"{name}.py").write_text(_HEAD + text)
        children.append(start_process(name))
        return children[-1]

    yield start
    for process, sock in children:
        process.kill()
        process.wait()
        sock.close()


def read_line(sock: socket.socket) -> str:
    """The next line; "" at the end."""
    sock.settimeout(30)
    data = b""
    while not data.endswith(b"\n"):
        byte = sock.recv(1)
        if not byte:
            break
        data += byte
    return data.decode().strip()


def wait_end(pid_fd: int) -> None:
    """Wait until the process is gone."""
    readable, _, _ = select.select([pid_fd], [], [], 30)
    os.close(pid_fd)
    assert readable, "it lives on"


def test_a_process_sees_no_gpu_one_thread_and_the_same_modules(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    odd = tmp_path / "12:30:00"
    odd.mkdir()
    (odd / "beside.py").write_text("WHERE = 'beside'")
    monkeypatch.syspath_prepend(str(odd))
    monkeypatch.setattr(sys, "path", ["", *sys.path, Path("not a string")])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.delenv("OPENBLAS_NUM_THREADS")
    process, sock = start(
        "seer",
        """
import beside
def main():
    sock, parent = enter_process("loaderd-seer")
    names = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "HOME")
    facts = [[os.environ.get(name) for name in names], sys.path, parent, os.getsid(0), beside.WHERE]
    facts.append(os.get_inheritable(sock.fileno()))
    sock.sendall(json.dumps(facts).encode() + b"\\n")
    sock.recv(1)
""",
    )
    environment, path, parent, session, where, is_inheritable = json.loads(read_line(sock))
    assert environment == ["-1", "1", "1", "1", os.environ.get("HOME")]
    assert path == [os.getcwd(), *sys.path[1:-1]]
    assert (parent, session, where, is_inheritable) == (os.getpid(), process.pid, "beside", False)
    assert Path(f"/proc/{process.pid}/comm").read_text() == "loaderd-seer\n"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
    sock.send(b"x")
    assert how_it_ended(process.wait()) == "ended with status 0"


def test_the_main_script_is_not_run_again(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(
        """
from loaderd.protocol.starting import start_process
print("run", flush=True)
process, sock = start_process("child")
print(sock.recv(100).decode(), process.wait())
"""
    )
    (tmp_path / "child.py").write_text(
        """
from loaderd.protocol.process import enter_process
def main():
    enter_process("child")[0].sendall(b"child")
"""
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("run\nchild 0\n", "")


_MIDDLE = """
def main():
    sock, _ = enter_process("middle")
    child, childs = start_process("leaf")
    childs.recv(1)
    sock.sendall(f"{child.pid}\\n".encode())
    signal.pause()
"""


def test_a_process_dies_with_its_parent(start: Start, tmp_path: Path):
    (tmp_path / "leaf.py").write_text(
        _HEAD
        + """
def main():
    sock, parent = enter_process("leaf")
    die_with_parent(parent)
    sock.send(b"x")
    while True:
        signal.pause()
"""
    )
    middle, sock = start("middle", _MIDDLE)
    leaf = os.pidfd_open(int(read_line(sock)))
    assert not select.select([leaf], [], [], 0)[0]
    middle.send_signal(signal.SIGKILL)
    wait_end(leaf)


def test_a_process_whose_parent_died_before_it_could_ask_for_it(start: Start, tmp_path: Path):
    said = tmp_path / "said"
    (tmp_path / "leaf.py").write_text(
        _HEAD
        + f"""
def main():
    sock, parent = enter_process("leaf")
    waiting = os.pidfd_open(parent)
    sock.send(b"x")
    select.select([waiting], [], [])
    open({str(said)!r}, "a").write("orphan ")
    die_with_parent(parent)
    open({str(said)!r}, "a").write("alive")
"""
    )
    middle, sock = start("middle", _MIDDLE)
    leaf = os.pidfd_open(int(read_line(sock)))
    middle.send_signal(signal.SIGKILL)
    middle.wait()
    wait_end(leaf)
    assert said.read_text() == "orphan "


def test_only_one_end_of_the_socket_is_with_the_child(start: Start):
    """Otherwise neither would notice the other's end."""
    process, sock = start("ends", "def main():\n    enter_process('ends')[0].sendall(b'bye\\n')\n")
    assert read_line(sock) == "bye"
    assert read_line(sock) == ""
    process.wait()


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("exit 3", "ended with status 3"),
        ("kill -SEGV $$", "was killed by SIGSEGV"),
        ("kill -45 $$", "was killed by signal 45"),
    ],
)
def test_how_it_ended(command: str, expected: str):
    assert how_it_ended(subprocess.run(["/bin/sh", "-c", command]).returncode) == expected


@pytest.mark.parametrize("executable", [None, "", "/no/python"])
def test_a_python_that_cannot_be_run_is_named(executable: str | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "executable", executable)
    with pytest.raises(DaemonError, match=f"sys.executable must be a Python that can be run, got {executable!r}"):
        start_process("child")


def test_a_fork_while_a_process_is_started_does_not_hide_its_end(tmp_path: Path):
    """A fork of another thread's, as of one that starts workers of its own; it lives on."""
    (tmp_path / "ends.py").write_text("def main(): pass")
    script = tmp_path / "forking.py"
    script.write_text("""
import os, select, subprocess
from loaderd.protocol import starting

popen = subprocess.Popen
read, write = os.pipe()

def fork_first(*command, **options):
    if not os.fork():
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    return popen(*command, **options)

starting.subprocess.Popen = fork_first
process, ours = starting.start_process("ends")
assert process.wait() == 0
readable, _, _ = select.select([ours], [], [], 30)
assert readable and ours.recv(1) == b""
""")
    found = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 0, found.stderr
