"""``loaderd serve``: what it refuses before it starts anything, and what it shows of itself."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loaderd.cli.main import main, parser
from loaderd.cli.serve import options_of
from loaderd.serve.options import Address, HttpOptions, UnixOptions


def options(*arguments: str) -> UnixOptions | HttpOptions:
    return options_of(parser().parse_args(["serve", "a.b:train", *arguments]))


@pytest.fixture(autouse=True)
def _no_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("LOADERD_TOKEN", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def test_defaults(tmp_path: Path):
    assert options() == UnixOptions(("a.b:train",), unix=str(tmp_path / "loaderd.sock"))
    assert options("--listen", "127.0.0.1:0") == HttpOptions(("a.b:train",))


def test_every_option_arrives(tmp_path: Path):
    both = "c:valid --workers 3 --watchdog 60 --health [::1]:9 --log-format json --grace 0 --state /state "
    expected: dict[str, Any] = {
        "targets": ("a.b:train", "c:valid"),
        "workers": 3,
        "watchdog": 60.0,
        "health": Address("::1", 9),
        "log_format": "json",
        "grace": 0.0,
        "state": "/state",
    }
    text = "--unix x.sock --max-consumers 5 --max-held-batches 6 --max-memory 2GiB --idle-timeout 7.5"
    of_unix = {
        "unix": os.path.abspath("x.sock"),
        "max_consumers": 5,
        "max_held_batches": 6,
        "max_memory": 2 << 30,
        "idle_timeout": 7.5,
    }
    assert options(*(both + text).split()) == UnixOptions(**expected, **of_unix)
    assert set(expected | of_unix) == set(UnixOptions.__dataclass_fields__)
    files = {name: str(tmp_path / name) for name in ("cert", "key", "ca", "token")}
    for path in files.values():
        Path(path).write_text("secret\n")
        Path(path).chmod(0o600)
    text = (
        "--listen 0.0.0.0:8471 --insecure --max-connections 8 --max-bandwidth 100MB --tls-cert {cert} "
        "--tls-key {key} --tls-client-ca {ca} --token-file {token}"
    )
    of_http = {
        "listen": Address("0.0.0.0", 8471),
        "insecure": True,
        "max_connections": 8,
        "max_bandwidth": 100_000_000,
        "tls_cert": files["cert"],
        "tls_key": files["key"],
        "tls_client_ca": files["ca"],
        "token_file": files["token"],
    }
    assert options(*(both + text.format(**files)).split()) == HttpOptions(**expected, **of_http)
    assert set(expected | of_http) == set(HttpOptions.__dataclass_fields__)


def test_without_a_folder_of_the_user_it_makes_one_in_tmp(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    default = options()
    assert isinstance(default, UnixOptions)
    found = Path(default.unix)
    assert found == Path(f"/tmp/loaderd-{os.getuid()}/loaderd.sock")
    assert stat.S_IMODE(found.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--listen", "0.0.0.0:8471"], "needs TLS (--tls-cert and --tls-key) and a token (--token-file"),
        (["--listen", "8471"], "--listen must be HOST:PORT"),
        (["--health", "localhost"], "--health must be HOST:PORT"),
        (["--max-memory", "99999999999GiB"], "max_memory must be from 1 to 2**63 - 1 bytes"),
        (["--max-memory", f"{'9' * 400}GiB"], "--max-memory must be like 100MB"),
        (["--listen", "127.0.0.1:0", "--max-bandwidth", "99999999999GiB"], "max_bandwidth must be from 1 to"),
        (["--listen", "a..b:80"], "--listen must be HOST:PORT"),
        (["--health", f"{'a' * 64}:80"], "--health must be HOST:PORT"),
        (["--listen", "127.0.0.1:0", "--max-bandwidth", "fast"], "--max-bandwidth must be like 100MB"),
        (["--listen", "127.0.0.1:0", "--max-bandwidth", "100"], "must be like 100MB, with a unit of B, kB, MB"),
        (["--listen", "127.0.0.1:0", "--token-file", "missing"], "missing"),
        (["--listen", "127.0.0.1:0", "--unix", "x.sock"], "--unix and --listen are two servers"),
        (["--listen", "127.0.0.1:0", "--max-consumers", "1"], "--max-consumers is for a server with --unix"),
        (["--token-file", "missing"], "--token-file is for a server with --listen"),
        (["--max-bandwidth", "1MB"], "--max-bandwidth is for a server with --listen"),
        (["--insecure"], "--insecure is for a server with --listen"),
        (["--unix", "missing/x.sock"], "No such file or directory"),
        (["--workers", "0"], "workers must be a positive integer"),
    ],
)
def test_what_is_refused(
    tmp_path: Path,
    arguments: list[str],
    error: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["serve", "a.b:train", *arguments])
    printed = capsys.readouterr()
    assert (ended.value.code, printed.out) == (2, "")
    assert error in printed.err and "Traceback" not in printed.err
    assert list(tmp_path.iterdir()) == []


def test_what_it_needs_not_it_does_not_import():
    names = ("asyncio", "prometheus_client", "pyarrow", "uvicorn")
    code = f"import sys, loaderd.cli.serve; print([name for name in {names} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr
