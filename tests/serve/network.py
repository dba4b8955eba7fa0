"""A network of its own for a test: two hosts and the line between them, as network namespaces of the kernel.

The server runs on one, the consumer on the other. The line can be unplugged; where the kernel has it, ``tc netem``
makes it slow and lossy. For what the kernel cannot do, a proxy stands on the consumer's host (``slow_line.py``).
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from typing import Any

import pytest

SERVER, CONSUMER = "10.213.7.1", "10.213.7.2"


class Network:
    """Hosts "server" and "consumer". Skips the test where namespaces are not allowed."""

    def __init__(self) -> None:
        if shutil.which("ip") is None:
            pytest.skip("network namespaces are made with the ip command, which is not here")
        self._names = {host: f"loaderd-{os.getpid()}-{host}" for host in ("server", "consumer")}
        try:
            for name in self._names.values():
                _run("ip", "netns", "add", name)
            server, consumer = self._names.values()
            _run("ip", "-n", server, "link", "add", "line", "type", "veth", "peer", "name", "line", "netns", consumer)
            for name, address in ((server, SERVER), (consumer, CONSUMER)):
                _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "line")
                _run("ip", "-n", name, "link", "set", "line", "up")
                _run("ip", "-n", name, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            self.close()
            pytest.skip(f"network namespaces are not allowed here: {error.stderr.strip()}")

    def on(self, host: str, *command: str) -> list[str]:
        """The command that runs ``command`` on a host."""
        return ["ip", "netns", "exec", self._names[host], *command]

    def plug(self, plugged: bool) -> None:
        """Unplugged, everything that is sent is lost, and nobody is told."""
        _run("ip", "-n", self._names["server"], "link", "set", "line", "up" if plugged else "down")

    def disturb(self, *netem: str) -> None:
        """Delay and lose what goes either way: see tc-netem(8). Skips the test where the kernel cannot."""
        for host in self._names:
            try:
                _run(*self.on(host, "tc", "qdisc", "replace", "dev", "line", "root", "netem", *netem))
            except (subprocess.CalledProcessError, FileNotFoundError) as error:
                pytest.skip(f"tc netem is not here: {getattr(error, 'stderr', error)}")

    def calm(self) -> None:
        """The end of :meth:`disturb`, and of what a test has left unplugged."""
        self.plug(True)
        for host in self._names:
            with contextlib.suppress(subprocess.CalledProcessError, FileNotFoundError):  # there was nothing
                _run(*self.on(host, "tc", "qdisc", "delete", "dev", "line", "root"))

    def num_lost(self) -> int:
        """How many segments the server has had to send again."""
        command = self.on("server", "cat", "/proc/net/snmp")
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
        names, values = (line.split() for line in lines if line.startswith("Tcp:"))
        return int(values[names.index("RetransSegs")])

    def close(self) -> None:
        for name in self._names.values():
            with contextlib.suppress(subprocess.CalledProcessError):
                _run("ip", "netns", "delete", name)


class Lines:
    """A process that is talked to in lines. What it says waits in its pipe: it is not read ahead."""

    def __init__(self, command: list[str]) -> None:
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        self._said = bytearray()

    def next(self, limit_s: float = 60.0) -> str:
        """The next line."""
        assert self.process.stdout is not None
        until_s = time.monotonic() + limit_s
        while b"\n" not in self._said:
            arrived, _, _ = select.select([self.process.stdout], [], [], max(0.0, until_s - time.monotonic()))
            assert arrived, f"nothing is said for {limit_s} s"
            data = os.read(self.process.stdout.fileno(), 1 << 12)
            assert data, f"it has ended with status {self.process.wait()}"
            self._said += data
        line, _, self._said = self._said.partition(b"\n")
        return line.decode()

    def say(self, value: Any) -> None:
        """A line of JSON."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(value).encode() + b"\n")

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
