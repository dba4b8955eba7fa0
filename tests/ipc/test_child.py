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

import loaderd
from loaderd.errors import DaemonError
from loaderd.ipc.child import how_it_ended
from loaderd.ipc.spawn import start_process

Child = tuple["subprocess.Popen[bytes]", socket.socket]
Start = Callable[[str, str], Child]

_HEAD = """
import json, os, select, signal, sys
from loaderd.ipc.child import die_with_parent, enter_process
from loaderd.ipc.spawn import start_process
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
from loaderd.ipc.spawn import start_process
print("run", flush=True)
process, sock = start_process("child")
print(sock.recv(100).decode(), process.wait())
"""
    )
    (tmp_path / "child.py").write_text(
        """
from loaderd.ipc.child import enter_process
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
    """Nor the start: a fork of another thread's, as of one that starts workers of its own; it lives on."""
    (tmp_path / "ends.py").write_text("def main(): pass")
    script = tmp_path / "forking.py"
    script.write_text("""
import os, select, threading
from loaderd.ipc.spawn import start_process

read, write = os.pipe()
pipe, forked = os.pipe, threading.Event()

def fork():
    if not os.fork():
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    forked.set()

def pipe_beside_a_fork():
    ends = pipe()
    threading.Thread(target=fork).start()
    forked.wait(0.5)  # it has to wait
    return ends

os.pipe = pipe_beside_a_fork  # Popen opens one, by which it learns that the child runs
process, ours = start_process("ends")
assert process.wait() == 0
assert forked.wait(30)
readable, _, _ = select.select([ours], [], [], 30)
assert readable and ours.recv(1) == b""
""")
    found = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 0, found.stderr


def test_a_process_has_its_parents_arguments_flags_and_folder(tmp_path: Path):
    """Also far longer ones than a command line may be, of which one holds a line feed."""
    (tmp_path / "lib\n").mkdir()
    (tmp_path / "lib\n" / "imported.py").touch()
    (tmp_path / "lib\n" / "tells.py").write_text("""
import os, sys
from loaderd.ipc.child import enter_process
def main():
    print(len(sys.path) > 900, os.getcwd())
    sock, _ = enter_process("tells")
    print(sys.argv, sys.flags.utf8_mode, sys.flags.isolated)
    sock.recv(1)
    os._exit(0)  # as a worker ends: what is not written yet is lost
""")
    script = tmp_path / "starts.py"
    script.write_text(f"""
import os, sys
sys.path[:0] = ["lib\\n", {str(Path(loaderd.__file__).parents[1])!r}]
from loaderd.ipc.spawn import search_path, start_process
sys.path += ["/long" * 50 + str(number) for number in range(1000)]
path = search_path()
import imported
os.chdir("/")
assert search_path() == path
process, sock = start_process("tells", path=path)
sock.close()
sys.exit(process.wait())
""")
    command = [sys.executable, "-I", "-X", "utf8", script, "--batch-size", "12"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path, env=environment)
    assert found.stdout == f"True /\n{[str(script), '--batch-size', '12']} 1 1\n", found.stderr


def test_a_send_to_a_process_that_is_gone_ends_nobody(tmp_path: Path):
    """Though SIGPIPE would: programs of pipelines ask for that."""
    script = tmp_path / "sends.py"
    script.write_text("""
import os, signal, socket
from loaderd.client.transport import Transport
from loaderd.ipc.channel import Channel, ChannelClosed
from loaderd.ipc.messages import Bye

signal.signal(signal.SIGPIPE, signal.SIG_DFL)
file = os.open(os.devnull, os.O_RDONLY)
for how in ("send", "post"):
    for fds in ((), (file,)):
        ours, theirs = socket.socketpair()
        theirs.close()
        try:
            getattr(Channel(ours), how)(Bye(""), fds)
        except ChannelClosed:
            print(how, len(fds))
ours, theirs = socket.socketpair()
theirs.close()
Transport("a server", ours).close()
print("closed")
""")
    found = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=False)
    assert (found.returncode, found.stdout) == (0, "send 0\nsend 1\npost 0\npost 1\nclosed\n"), found.stderr
