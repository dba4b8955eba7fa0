"""Addresses of servers: what they name, and what is none."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import loaderd
from loaderd.client.connect import ask_status
from loaderd.errors import OptionError, ServerError
from loaderd.remote.address import unix_path
from tests.helpers.another_user import another_user


@pytest.mark.parametrize(
    ("address", "path"),
    [
        ("unix:///run/x.sock", "/run/x.sock"),
        ("unix:/run/x.sock", "/run/x.sock"),
        ("unix:x.sock", os.path.abspath("x.sock")),
        ("unix:", "/run/user/7/loaderd.sock"),
        ("unix:///a:b?c#d%20", "/a:b?c#d%20"),
        ("http://localhost:8471", None),
        ("https://[::1]:8471", None),
    ],
)
def test_what_an_address_names(address: str, path: str | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert unix_path(address) == path


@pytest.mark.parametrize(
    "address",
    [
        "",
        "/run/x.sock",
        "unix",
        "unix://run/x.sock",
        "ftp://localhost:1",
        "http:",
        "http://localhost",
        "http://:1",
        "http://a:b",
        "http://a:99999",
        "http://a:1/x",
        "http://token@a:1",
        "http://[::1:1",
        "http://a..b:1",
        "https://\udcff:1",
    ],
)
def test_what_is_no_address(address: str):
    with pytest.raises(OptionError, match="address must be unix:///PATH"):
        loaderd.connect(address, dataset="train", batch_size=10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": ""}, "dataset must be"),
        ({"batch_size": 0}, "batch_size must be"),
        ({"sharing": "fair"}, "sharing must be"),
        ({"sharing": "split"}, 'sharing="split" needs shard'),
        ({"shard": (1, 2), "sharing": "mirrored"}, 'is for sharing="split"'),
        ({"consumers": 2}, 'is for sharing="mirrored"'),
        ({"start": 3}, "start must be"),
        ({"reconnect_timeout": -1}, "reconnect_timeout must be"),
        ({"tls": "ca.pem"}, "tls must be a loaderd.TLS"),
        ({"tls": loaderd.TLS()}, "tls must be None at unix:///nowhere: it is for servers on the network"),
        ({"workers": 2}, "workers must be None at unix:///nowhere: it is for servers on the network"),
        ({"name": "a\nb"}, "name must be text"),
    ],
)
def test_options_are_checked_before_anything_is_connected(options: dict[str, object], message: str):
    with pytest.raises(OptionError, match=message):
        loaderd.connect("unix:///nowhere", **{"dataset": "train", "batch_size": 10, **options})


def test_tls_wants_a_certificate_with_its_key(tmp_path: Path):
    assert loaderd.TLS(cert=tmp_path / "a.pem", key="b.pem").key == os.path.abspath("b.pem")
    with pytest.raises(OptionError, match=r"TLS.cert and TLS.key belong together"):
        loaderd.TLS(cert="a.pem")
    with pytest.raises(OptionError, match=r"TLS.ca must be text or None, got 3"):
        loaderd.TLS(ca=3)


def test_nobody_listens(tmp_path: Path):
    """There is no socket; there is one that a dead server left behind; what listens hangs up."""
    for stage in ("No such file or directory", "Connection refused"):
        with pytest.raises(ServerError, match=stage) as caught:
            loaderd.connect(f"unix://{tmp_path}/s.sock", dataset="train", batch_size=10)
        assert "loaderd serve" in str(caught.value)
        with socket.socket(socket.AF_UNIX) as left:
            if stage.startswith("No"):
                left.bind(f"{tmp_path}/s.sock")
    with pytest.raises(ServerError, match="Connection refused"):
        ask_status(f"unix://{tmp_path}/s.sock")


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x92\x02\x01", b"\xc1"])
def test_something_else_listens(tmp_path: Path, answer: bytes):
    address = f"unix://{tmp_path}/s.sock"
    ask = [lambda: loaderd.connect(address, dataset="train", batch_size=10), lambda: ask_status(address)]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{tmp_path}/s.sock")
        listener.listen()

        def serve() -> None:
            with listener.accept()[0] as other:
                other.recv(1000)
                other.sendall(answer)
                other.recv(1000)

        for question in ask:
            thread = threading.Thread(target=serve)
            thread.start()
            with pytest.raises(ServerError, match="sent something that is not a loaderd message"):
                question()
            thread.join()


def test_nobody_answers(tmp_path: Path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{tmp_path}/s.sock")
        listener.listen()
        with pytest.raises(ServerError, match=r"said nothing for 0.1 s"):
            ask_status(f"unix://{tmp_path}/s.sock", timeout_s=0.1)


_SOMEBODY_ELSE = """
import os, socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
os.chmod(sys.argv[1], 0o666)
os.setuid(65534)
listener.listen()
print(flush=True)
listener.accept()[0].recv(1)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_a_server_that_serves_another_user(tmp_path: Path):
    for folder in [tmp_path, *tmp_path.parents][:-2]:
        os.chmod(folder, 0o755)
    path = tmp_path / "s.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        os.chmod(path, 0o600)
        listener.listen()
        ask = [
            lambda: ask_status(f"unix://{path}"),
            lambda: loaderd.connect(f"unix://{path}", dataset="train", batch_size=10),
        ]
        for question in ask:
            with another_user(), pytest.raises(ServerError, match="Permission denied") as caught:
                question()
            assert caught.value.hint == "A server serves its own user and root; this is user 65534."


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_a_server_of_somebody_else_is_not_believed(tmp_path: Path):
    path = tmp_path / "s.sock"
    with subprocess.Popen([sys.executable, "-c", _SOMEBODY_ELSE, str(path)], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(ServerError, match="runs as user 65534, and this is user 0"):
            loaderd.connect(f"unix://{path}", dataset="train", batch_size=10)
