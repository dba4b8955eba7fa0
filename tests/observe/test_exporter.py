"""The figures of a loader, scraped over HTTP as Prometheus does."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import loaderd
from loaderd.errors import OptionError, install_hint
from loaderd.observe.exporter import serve_metrics
from tests.helpers.serving import wait_until


def scrape(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {
        " ".join([sample.name, *sample.labels.values()]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_loader_gives_its_figures(
    write_numbered: Callable[[Sequence[int]], list[Path]], numbered_schema: loaderd.Schema
):
    paths = write_numbered([200, 100])
    with loaderd.Loader(paths, numbered_schema, batch_size=50, workers=1) as loader:
        assert scrape(loader.serve_metrics(0))["loaderd_batches_total"] == 0, "at all addresses"
        port = loader.serve_metrics(0, "127.0.0.1")
        assert sum(1 for _ in loader) == 6
        found = scrape(port)
        assert (found["loaderd_batches_total"], found["loaderd_records_total"]) == (6, 300)
        assert found["loaderd_workers"] == 1 and found["loaderd_dataset_records"] == 300
        statistics = loader.statistics()
        spent = {**statistics.stage_s, **statistics.field_s}
        stages = {name.split()[1]: value for name, value in found.items() if name.startswith("loaderd_stage_seconds")}
        assert set(stages) == set(spent) and stages["parse"] == spent["parse"] > 0 and stages["bits"] > 0
        assert found["loaderd_waiting_seconds_total"] == pytest.approx(statistics.wait_s)
        with pytest.raises(OptionError, match=f"cannot be served at 127.0.0.1:{port}"):
            loader.serve_metrics(port, "127.0.0.1")
        with pytest.raises(OptionError, match=r"host must be the name or address of this machine, got 'a\.\.b'"):
            loader.serve_metrics(0, "a..b")
    with pytest.raises(OSError):
        scrape(port)


@pytest.mark.parametrize("port", [-1, 99999, 1 << 70])
def test_a_port_that_there_is_not(port: int):
    class Loader:
        """It is not asked for anything."""

    loader: Any = Loader()
    with pytest.raises(OptionError, match=f"port must be an integer from 0 to 65535, got {port}"):
        serve_metrics(port, "127.0.0.1", loader)


@pytest.mark.slow
def test_a_loader_that_nobody_has_gives_its_port_back(
    write_numbered: Callable[[Sequence[int]], list[Path]], numbered_schema: loaderd.Schema
):
    """As where the cell of a notebook is run again."""
    paths = write_numbered([50])
    threads, port = threading.active_count(), 0
    for _ in range(3):
        loader = loaderd.Loader(paths, numbered_schema, batch_size=50, workers=1)
        port = loader.serve_metrics(port, "127.0.0.1")
        next(iter(loader))
        assert scrape(port)["loaderd_batches_total"] == 1
        del loader
        gc.collect()
        with pytest.raises(OSError):
            scrape(port)
    wait_until(lambda: threading.active_count() <= threads)


def test_an_end_does_not_wait_for_the_thread(
    write_numbered: Callable[[Sequence[int]], list[Path]], numbered_schema: loaderd.Schema
):
    """The port is free at once."""
    loader = loaderd.Loader(write_numbered([50]), numbered_schema, batch_size=50, workers=1)
    loader.close()
    port, took_s = 0, []
    for _ in range(5):
        port = loader.serve_metrics(port, "127.0.0.1")
        began_s = time.monotonic()
        loader.close()
        took_s.append(time.monotonic() - began_s)
    assert min(took_s) < 0.1


def run(folder: Path, paths: list[Path], lines: str) -> str:
    """What a program over the first of these shards prints."""
    script = folder / "program.py"
    script.write_text(f"""
import gc, os, sys, urllib.request
import loaderd

schema = loaderd.Schema({{"id": loaderd.Int64()}}, {{"id": loaderd.Array("id")}})
{textwrap.dedent(lines)}""")
    quiet = ("-W", "ignore::DeprecationWarning")  # from 3.12 on, Python warns of every fork beside a thread
    done = subprocess.run(
        [sys.executable, *quiet, script, paths[0]], capture_output=True, text=True, timeout=60, check=True
    )
    assert not done.stderr
    return done.stdout


def test_a_fork_leaves_the_port_to_its_parent(write_numbered: Callable[[Sequence[int]], list[Path]], tmp_path: Path):
    lines = """
    with loaderd.Loader(sys.argv[1], schema, batch_size=10, workers=1) as loader:
        port = loader.serve_metrics(0, "127.0.0.1")
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30).close()
    print("a fork" if child == 0 else "its parent", "has left the block", flush=True)
    """
    assert run(tmp_path, write_numbered([50]), lines) == "a fork has left the block\nits parent has left the block\n"


def test_without_prometheus_client_it_says_what_to_install():
    program = "import sys; sys.modules['prometheus_client'] = None; import loaderd.observe.exporter"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    said = f"ModuleNotFoundError: serve_metrics() needs prometheus-client: {install_hint('metrics')}"
    assert done.stderr.splitlines()[-1] == said
