"""Serves the figures of a loader to Prometheus, over HTTP, with the names and labels of a server's figures."""

from __future__ import annotations

import os
import socket
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from loaderd.errors import OptionError, install_hint
from loaderd.observe.statistics import Statistics
from loaderd.options import is_count, require

try:
    from prometheus_client import CollectorRegistry, start_http_server
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
except ModuleNotFoundError:
    raise ModuleNotFoundError(
        f"serve_metrics() needs prometheus-client: {install_hint('metrics')}", name="prometheus_client"
    ) from None

_MOST_PORT = (1 << 16) - 1


def serve_metrics(port: int, host: str, loader: Any) -> tuple[int, Callable[[], object]]:
    """Answer at a port (0: any that is free), in a thread; return the port, and a function that ends it.

    ``loader``: its ``statistics()`` are served; the thread also ends when it is garbage. Raises OptionError where the
    port cannot be had.
    """
    require(is_count(port, 0) and port <= _MOST_PORT, "port", f"an integer from 0 to {_MOST_PORT}", port)
    require(isinstance(host, str), "host", "the name or address of this machine", host)
    registry = CollectorRegistry()
    registry.register(_Collector(loader))
    try:
        server, _ = start_http_server(port, host or None, registry)  # type: ignore[arg-type]  # None: all addresses
    except OSError as error:
        raise OptionError(f"metrics cannot be served at {host}:{port}: {error.strerror}") from None
    except ValueError as error:  # of a name that can be no host's, such as "a..b"
        raise OptionError(f"host must be the name or address of this machine, got {host!r}: {error}") from None
    maker = os.getpid()

    def end() -> None:
        # The caller may be the thread that would have to be waited for, as this may be the garbage collector's call.
        # A fork of the process shares the socket, but has no such thread.
        if os.getpid() == maker:
            server.socket.shutdown(socket.SHUT_RDWR)  # the port is free at once
            threading.Thread(target=server.shutdown, daemon=True).start()
        server.server_close()

    finalizer = weakref.finalize(loader, end)
    finalizer.atexit = False
    return int(server.server_port), finalizer


class _Collector:
    """The collector that a registry asks for figures."""

    def __init__(self, loader: Any) -> None:
        self._loader = weakref.ref(loader)

    def describe(self) -> Iterable[Metric]:
        """Nothing: names need not be known in advance."""
        return []

    def collect(self) -> Iterator[Metric]:
        loader = self._loader()
        return iter(()) if loader is None else _families(loader.statistics())


def _families(now: Statistics) -> Iterator[Metric]:
    counted = {
        "batches": ("Batches that were delivered to consumers", now.batches_delivered),
        "records": ("Records that were delivered to consumers", now.records_delivered),
        "waiting_seconds": ("Time that consumers have waited for batches", now.wait_s),
        "device_waiting_seconds": (
            "Time that consumers have waited for copies to a device",
            now.device_wait_s,
        ),
        "records_skipped": ("Deliveries left out because of damage", now.records_skipped),
    }
    for name, (about, value) in counted.items():
        yield CounterMetricFamily(f"loaderd_{name}", about, value=value)
    restarts = {"worker": now.workers_restarted, "daemon": now.daemon_restarts}
    yield _labelled("restarts", "Processes that died and were replaced", "process", restarts)
    about = "Time of all workers by stage, and by field; slot, window: waiting for these"
    yield _labelled("stage_seconds", about, "stage", {**now.stage_s, **now.field_s})
    gauges = {
        "workers": ("Worker processes", now.workers),
        "slots": ("Batches that consumers' memory has room for", now.slots),
        "slots_lent": ("Batches that consumers hold", now.slots_lent),
        "memory_bytes": (
            "Shared memory of windows and slots",
            now.window_bytes + now.slots * now.slot_bytes,
        ),
        "dataset_shards": ("Shards of the data set", now.num_shards),
        "dataset_records": ("Records of an epoch of the data set", now.num_records),
    }
    for name, (about, size) in gauges.items():
        yield GaugeMetricFamily(f"loaderd_{name}", about, value=size)


def _labelled(name: str, about: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(f"loaderd_{name}", about, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
