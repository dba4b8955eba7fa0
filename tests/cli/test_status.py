"""``loaderd status``: a screen about a server, and where there is none."""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from rich.console import Console

from loaderd.cli.main import main
from loaderd.cli.status import Answers, screen
from tests.helpers.commands import run


def report(*consumers: dict[str, Any], pid: int = 7) -> dict[str, Any]:
    fields = {"board": "float32 (8, 8, 24)"}
    return {
        "version": "1.2.3",
        "pid": pid,
        "started_s": 0.0,
        "workers": 2,
        "workers_restarted": 1,
        "memory_bytes": 3 << 20,
        "datasets": [
            {"name": "train", "state": "ready", "num_shards": 16, "num_records": 1234567, "fields": fields},
            {"name": "valid", "state": "indexing 41 %", "num_shards": 0, "num_records": 0, "fields": fields},
        ],
        "consumers": list(consumers),
    }


def consumer(number: int, records: int, name: str = "trainer", **more: Any) -> dict[str, Any]:
    return {
        "number": number,
        "name": name,
        "pid": 100 - number,
        "dataset": "train",
        "sharing": "mirrored",
        "group": "all",
        "shard": [0, 1],
        "epoch": 3,
        "batch": 5,
        "records": records,
        "bytes": records * 1000,
        "slots": 12,
        "slots_lent": 2,
        "idle_s": 0.25,
        "state": "waits for the trainer",
        **more,
    }


def shown(*reports: dict[str, Any], seconds: float = 2.0) -> list[list[str]]:
    """The words of each line; ``reports``: of each server, the one before and the one now."""
    console = Console(file=io.StringIO(), width=200)
    pairs = {f"https://{number}:8471": reports[at : at + 2] for number, at in enumerate(range(0, len(reports), 2))}
    before = Answers(10.0, {address: pair[0] for address, pair in pairs.items()})
    console.print(screen(before, Answers(10.0 + seconds, {address: pair[1] for address, pair in pairs.items()})))
    assert isinstance(console.file, io.StringIO)
    return [line.split() for line in console.file.getvalue().splitlines()]


def test_data_sets_consumers_rates_and_who_waits():
    lines = shown(report(consumer(-3, 5000)), report(consumer(-3, 9000), consumer(-4, 10, "[red]odd[/red]")))
    assert lines[0][:5] == ["loaderd", "1.2.3,", "process", "7,", "for"]
    assert " ".join(lines[0]).endswith("2 workers (1 replaced); 3 MiB of windows and batches")
    assert lines[2] == ["train", "ready", "16", "1,234,567", "board", "float32", "(8,", "8,", "24)"]
    assert lines[3][:4] == ["valid", "indexing", "41", "%"]
    counted = ["train", "mirrored", "all", "3,", "5", "9,000", "2,000", "2.0", "2", "of", "12", "0", "s"]
    assert lines[5] == ["-3", "trainer", "(103)", *counted]
    assert lines[6] == ["-4", "[red]odd[/red]", "(104)", "train", "mirrored", "all", "3,", "5", "10", *counted[-5:]]
    assert lines[7] == ["-3", "trainer", "(103):", "waits", "for", "the", "trainer"]


def test_ranks():
    line = shown(report(), report(consumer(-3, 1, sharing="split", shard=[1, 4])))[5]
    assert line[3:8] == ["train", "split", "1", "of", "4"]


def test_rates_of_another_daemon_are_not_known():
    line = shown(report(consumer(-3, 5000), pid=6), report(consumer(-3, 100)))[5]
    assert line[8:] == ["100", "2", "of", "12", "0", "s"]


def test_one_who_has_just_come_and_nobody():
    newcomer = {"number": -3, "name": "", "pid": 9, "dataset": "train", "connected_s": 0.0, "idle_s": 0.0}
    assert shown(report(), report(newcomer))[5] == ["-3", "(9)", "train", "connecting", "0", "0", "s"]
    assert shown(report(), report())[-1] == ["no", "consumers"]


def http_report(*records: int) -> dict[str, Any]:
    of_unix = ("workers", "workers_restarted", "memory_bytes")
    who = {"name": "train.py", "host": "gpu1", "dataset": "train"}
    consumers = [
        {
            **who,
            "process": str(number),
            "rank": f"{number}/2",
            "records": each,
            "bytes": 100 * each,
            "seen": time.time(),
        }
        for number, each in enumerate(records)
    ]
    return {**{name: value for name, value in report().items() if name not in of_unix}, "consumers": consumers}


def test_servers_of_the_network_say_when_they_counted():
    before, now = http_report(0), http_report(3000)
    line = shown(before | {"counted_s": 100.0}, now | {"counted_s": 101.5}, seconds=1.0)[5]
    assert line[5:8] == ["0/2", "3,000", "2,000"]
    assert shown(now | {"counted_s": 100.0}, now | {"counted_s": 100.0})[5][5:8] == ["0/2", "3,000", "0"]


def test_servers_over_the_network_are_one_table():
    """What a consumer has had of each is added up."""
    first, second = http_report(1000, 10), http_report(3000, 20)
    lines = shown(http_report(0, 0), first, http_report(0, 0), second)
    assert [line[-1] for line in lines[:2]] == ["(https://0:8471)", "(https://1:8471)"]
    assert lines[3][:7] == ["train", "ready", "on", "2", "servers", "16", "1,234,567"]
    rows = {line[1]: line for line in lines if line[0] == "train.py"}
    assert rows["(0)"][2:8] == ["on", "gpu1", "train", "0/2", "4,000", "2,000"]
    assert rows["(1)"][6] == "30"


def test_four_hundred_consumers_are_no_four_hundred_lines():
    now = http_report(*range(400))
    lines = shown(now, now)
    assert len(lines) < 50 and lines[-1][:4] == ["…", "and", "360", "more:"]


def test_a_variable_that_is_set_to_nothing_is_no_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("LOADERD_TOKEN", "")
    for address, error in ((f"unix://{tmp_path}/x.sock", "loaderd serve"), ("http://127.0.0.1:1", "nothing answers")):
        done = run("status", address)
        assert done.returncode == 1 and error in done.stderr and "LOADERD_TOKEN" not in done.stderr


def test_a_host_that_there_cannot_be_is_no_address():
    done = run("status", "http://a..b:80")
    assert done.returncode == 1 and "address must be" in done.stderr and "Traceback" not in done.stderr


def test_where_there_is_no_server(tmp_path: Path):
    for address, error in ((f"unix://{tmp_path}/x.sock", "loaderd serve"), ("http://x", "must be unix:///PATH")):
        done = run("status", address)
        assert (done.returncode, done.stdout) == (1, "")
        assert error in done.stderr and "Traceback" not in done.stderr


class Liar(BaseHTTPRequestHandler):
    """A server on the network that says ``says`` of itself."""

    says: ClassVar[Any] = {}

    def do_GET(self) -> None:
        body = json.dumps(self.says).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def liar() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Liar) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.parametrize(
    "says",
    [
        {},
        {**report(), "started_s": []},
        {**report(), "datasets": [None]},
        {
            **report(),
            "datasets": [{"name": "a", "state": "ready", "num_shards": "x", "num_records": 1, "fields": {}}],
        },
        {**report(), "consumers": 3},
        {**report(), "consumers": [{"diagnosis": 3}]},
    ],
)
@pytest.mark.parametrize("command", ["status", "doctor"])
def test_what_is_no_report_is_an_error_and_no_traceback(
    liar: str, says: Any, command: str, capsys: pytest.CaptureFixture[str]
):
    Liar.says = says
    with pytest.raises(SystemExit) as ended:
        main([command, liar])
    assert ended.value.code == (1 if command == "status" else 2)
    error = capsys.readouterr().err
    has_no_consumers = "consumers" in says and not says["consumers"]
    assert ("has no consumer" if command == "doctor" and has_no_consumers else "is no report of a server") in error
