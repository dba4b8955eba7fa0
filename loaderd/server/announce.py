"""What a server logs at its start: what it serves, the memory that it takes, how to connect.

Each function returns lines for the log, with their levels.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping
from typing import Any

from loaderd.daemon.catalog import TYPICAL_BATCH_SIZE
from loaderd.machine import available_memory, in_mib
from loaderd.remote.address import TOKEN_VARIABLE
from loaderd.server.settings import Address, ServerOptions

Line = tuple[int, str]


def datasets(report: Mapping[str, Any], told: dict[str, str]) -> list[Line]:
    """What has changed in the data sets of a Status. Updates ``detect``: by name, what was logged of each last."""
    lines: list[Line] = []
    for dataset in report["datasets"]:
        name, state = dataset["name"], dataset["state"]
        if state in ("listing its shards", "indexing 0 %"):  # usually over before anybody reads it
            continue
        text = _about(dataset) if state == "ready" else f"{name}: {state.rstrip(' %0123456789')}"
        if told.get(name) != text:
            told[name] = text
            level = logging.ERROR if state.startswith("failed") else logging.INFO
            lines += [(level, line) for line in text.splitlines()]
    if lines and all(dataset["state"] == "ready" for dataset in report["datasets"]):
        memory = available_memory()
        text = f"memory: {in_mib(report['memory_bytes'])} for consumers now, {report['workers']} workers"
        lines.append((logging.INFO, f"{text}; {in_mib(memory.free_bytes)} are free ({memory.limit})"))
    return lines


def _about(dataset: Mapping[str, Any]) -> str:
    name, fields = dataset["name"], ", ".join(f"{field} {spec}" for field, spec in dataset["fields"].items())
    return (
        f"{name}: {dataset['num_records']:,} records in {dataset['num_shards']:,} shards; fields: {fields}\n"
        f"{name}: a consumer with batches of {TYPICAL_BATCH_SIZE} takes {in_mib(dataset['consumer_bytes'])}"
    )


def unix(path: str, options: ServerOptions) -> list[Line]:
    """How to connect on this machine."""
    return [_connect(f"unix://{path}", options, "")]


def network(address: Address, options: ServerOptions) -> list[Line]:
    """How to connect from other machines; ``address`` is where the gateway listens."""
    host = socket.gethostname() if address.host in ("0.0.0.0", "::") else address.host
    scheme = "grpc+tls" if options.tls_cert else "grpc"
    note = f"  # with the token in {TOKEN_VARIABLE}" if options.token else ""
    lines = [_connect(f"{scheme}://{Address(host, address.port)}", options, note)]
    if options.insecure and not (options.tls_cert and options.token):
        lines.append((logging.WARNING, f"--insecure: anybody who can connect to {address} can read the data sets"))
    return lines


def _connect(address: str, options: ServerOptions, note: str) -> Line:
    name = options.targets[0].partition(":")[2]  # from the options: no daemon may be running to ask
    call = f'loaderd.connect("{address}", dataset="{name}", batch_size={TYPICAL_BATCH_SIZE})'
    return logging.INFO, f"connect with {call}{note}"
