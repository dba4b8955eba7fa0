"""What the candidates of the server share: the server, which runs below the measured process, and its consumers.

::

    measured process ─┬─ loaderd serve candidates._dataset:dataset ── its processes
                      └─ (a daemon with workers of its own, where it reads over the network)

So the CPU time and the memory of the server count as the daemon's of an embedded loader do.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from candidates._dataset import CONFIG_VARIABLE, served_config
from harness.interface import Config, Step

import loaderd

_START_S, _STOP_S = 120.0, 20.0
_CONNECT = re.compile(r'loaderd\.connect\("((?:unix|http)[^"]+)"')


@contextmanager
def served(config: Config, *, network: bool = False) -> Iterator[str]:
    """A server of the config's records: its address, on a Unix socket or on a loopback port."""
    os.environ[CONFIG_VARIABLE] = json.dumps(asdict(config))
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        command = [str(Path(sys.executable).with_name("loaderd")), "serve", "candidates._dataset:dataset"]
        where = ["--listen", "127.0.0.1:0"] if network else ["--unix", f"{folder}/socket"]
        command += [*where, "--workers", str(config.workers), "--state", folder]
        with log.open("w") as out:
            server = subprocess.Popen(command, stderr=out)
        try:
            yield _address(server, log, "http" if network else "unix")
        finally:
            server.terminate()
            try:
                server.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _address(server: subprocess.Popen[bytes], log: Path, scheme: str) -> str:
    """Where the server says that it is to be connected to, as soon as it does."""
    deadline = time.monotonic() + _START_S
    while server.poll() is None and time.monotonic() < deadline:
        for address in _CONNECT.findall(log.read_text()):
            if address.startswith(scheme):
                return str(address)
        time.sleep(0.02)
    raise RuntimeError(f"the server gave no {scheme} address:\n{log.read_text()}")


def over_network(config: Config, num_servers: int) -> Iterator[Step]:
    """The steps of a consumer over the network, on loopback, of so many servers of the same data set."""
    with ExitStack() as servers:
        addresses = [servers.enter_context(served(config, network=True)) for _ in range(num_servers)]
        yield from consume(addresses, workers=config.workers)


def consume(address: str | list[str], **options: Any) -> Iterator[Step]:
    """The steps of a consumer; ``options`` are those of ``loaderd.connect``."""
    config = served_config()
    with loaderd.connect(
        address, dataset="dataset", batch_size=config.batch_size, epochs=config.epochs, **options
    ) as loader:
        for batch in loader:
            yield Step(next(iter(batch.values())).shape[0], batch)
