"""What the three programs share: their options, and how it is measured what each feed does to a training.

No framework is imported here. A program gives what each framework has in a way of its own:

``nets``
    by name, functions that make a network and its optimizer;
``feeds``
    by name, functions that open what feeds the training and return its batches, without end;
``train(net, batches, clock)``
    trains ``net`` until ``clock.tick()`` says that it is enough, and returns the last loss;
``take(batches, clock)``
    takes batches as long, without a network (``measure.take``, where they come in a loop of Python's);
``hold(batches)``
    gives the first of some batches again and again.

A GPU is **busy** in the share of the time in which a kernel ran, by NVML. A training **waits for data** in the share
of a step by which it is longer than the same step on a batch of this feed that is there already (**records/s at
hand**). Below 0, the step with the batch at hand took longer, and the share says only how inexact it is. With a
network on the CPU, waiting has in it the cores that feeding takes from the network. **Cores to feed** are those of
the training's process alone: the CPU time that it needs to take a batch, without a network, times the batches a
second of the training. (Where the CPU is the device, unpacking there is part of it.)
"""

from __future__ import annotations

import argparse
import glob
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from statistics import fmean
from typing import Any

FEEDS = ("framework", "floats", "packed")
NETS = ("residual", "nnue")
COLUMNS = "{:9} {:9} {:>12} {:>9} {:>17} {:>15} {:>14} {:>23} {:>8}"
GPU_SIZES = {"batch_size": 16_384, "seconds": 5.0, "filters": 128, "blocks": 6, "hidden": 512}
CPU_SIZES = {"batch_size": 512, "seconds": 1.0, "filters": 8, "blocks": 1, "hidden": 8}
POLL_S = 0.05
SETTLED_S = 1.0  # NVML's figure is of up to a second before

Feed = Callable[[], AbstractContextManager[Any]]


def options_of(description: str | None) -> argparse.Namespace:
    """The options of the command line, and ``gpu``: the name of the GPU to use, or None."""
    parser = argparse.ArgumentParser(
        description=description, epilog="Sizes have other defaults where there is no GPU: see measure.py."
    )
    parser.add_argument("--data", required=True, metavar="GLOB", help="the shards, such as 'shards/*/*.tfrecord'")
    parser.add_argument("--nets", nargs="+", choices=NETS, default=NETS, metavar="NET", help=f"of {', '.join(NETS)}")
    parser.add_argument(
        "--feeds", nargs="+", choices=FEEDS, default=FEEDS, metavar="FEED", help=f"of {', '.join(FEEDS)}"
    )
    parser.add_argument("--device", choices=["auto", "cpu", "gpu"], default="auto")
    parser.add_argument("--workers", type=int, default=max(1, len(os.sched_getaffinity(0)) - 2), help="of each feed")
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--seconds", type=float, help="of each measurement, behind a warm-up of half as much")
    parser.add_argument("--filters", type=int, help="of the residual net")
    parser.add_argument("--blocks", type=int, help="of the residual net")
    parser.add_argument("--hidden", type=int, help="neurons of the first layer of the NNUE-sized net")
    options = parser.parse_args()
    options.shards = sorted(glob.glob(options.data, recursive=True))
    if not options.shards:
        parser.error(f"--data: no file is called {options.data}; make_shards.py writes some")
    options.framework_workers = min(options.workers, len(options.shards))  # each has shards of its own
    options.gpu = None if options.device == "cpu" else gpu_name()
    if options.device == "gpu" and options.gpu is None:
        parser.error("--device gpu: nvidia-smi finds none here")
    if options.gpu is None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the framework has not looked for one yet
    for name, size in (GPU_SIZES if options.gpu else CPU_SIZES).items():
        if getattr(options, name) is None:
            setattr(options, name, size)
        if getattr(options, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be positive")
    return options


def check_gpu(options: argparse.Namespace, is_found: bool, package: str) -> None:
    """End the program where there is a GPU, and the framework does not find it."""
    if options.gpu and not is_found:
        sys.exit(f"{package} does not find {options.gpu}: install its build for CUDA, or give --device cpu")


def gpu_name() -> str | None:
    """The GPU that CUDA counts first, or None."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "" or shutil.which("nvidia-smi") is None:
        return None
    ask = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    for command in ([*ask, f"--id={_gpu_id()}"], ask):  # it does not know the ids of parts of a GPU (MIG)
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        if done.returncode == 0 and (names := done.stdout.splitlines()):
            return names[0]
    return None


def _gpu_id() -> str:
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]


class Clock:
    """Says when a measurement is over, and knows how it went: steps count once the warm-up is over."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._warm_s: float | None = None
        self._began_s: float | None = None
        self.num_steps, self.took_s, self.cpu_s = 0, 0.0, 0.0

    def tick(self, num_steps: int = 1) -> bool:
        """So many steps are over. Returns whether they were the last ones."""
        now_s = time.perf_counter()
        if self._warm_s is None:  # what came before compiled the network
            self._warm_s = now_s + self._seconds / 2
        elif self._began_s is None and now_s >= self._warm_s:
            self._began_s, self._began_cpu_s = now_s, time.process_time()
        elif self._began_s is not None:
            self.num_steps += num_steps
            self.took_s, self.cpu_s = now_s - self._began_s, time.process_time() - self._began_cpu_s
        return self.took_s >= self._seconds

    @property
    def timed(self) -> tuple[float, float]:
        """When the timed steps began and ended, by ``time.perf_counter()``."""
        assert self._began_s is not None
        return self._began_s, self._began_s + self.took_s


def take(batches: Iterable[Any], clock: Clock) -> None:
    """Take batches as long, without a network, and without waiting for the GPU, which would take CPU time."""
    for _ in batches:
        if clock.tick():
            break


class GpuMeter:
    """Asks NVML how busy the GPU is, twenty times a second. ``reason``: why it cannot, or ''."""

    def __init__(self, gpu: str | None) -> None:
        self.reason, self._samples = "", list[tuple[float, int]]()
        if gpu is None:
            return
        try:
            import pynvml

            pynvml.nvmlInit()
            number = _gpu_id()
            of_id = pynvml.nvmlDeviceGetHandleByIndex if number.isdecimal() else pynvml.nvmlDeviceGetHandleByUUID
            handle = of_id(int(number) if number.isdecimal() else number)
            self._percent = lambda: int(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
            self._percent()
        except ImportError:
            self.reason = "pip install nvidia-ml-py"
        except pynvml.NVMLError as error:
            self.reason = f"NVML says: {error}"
        else:
            threading.Thread(target=self._poll, daemon=True).start()

    def _poll(self) -> None:
        while True:
            self._samples.append((time.perf_counter(), self._percent()))
            time.sleep(POLL_S)

    def busy_share(self, began_s: float, ended_s: float) -> float | None:
        """The mean between two times; None if it is not known."""
        settled_s = min(SETTLED_S, (ended_s - began_s) / 2)
        percents = [percent for at_s, percent in self._samples if began_s + settled_s <= at_s <= ended_s]
        return fmean(percents) / 100 if percents else None


def run(
    framework: str,
    options: argparse.Namespace,
    nets: Mapping[str, Callable[[], Any]],
    feeds: Mapping[str, Feed],
    train: Callable[[Any, Any, Clock], float],
    take: Callable[[Any, Clock], None],
    hold: Callable[[Any], Any],
) -> None:
    """Train each net on each feed, and print a line each."""
    meter = GpuMeter(options.gpu)
    place = options.gpu or "the CPU, for there is no GPU here"
    workers = "1 worker" if options.workers == 1 else f"{options.workers} workers"
    print(f"{framework} on {place}: batches of {options.batch_size:,}, {workers} a feed")
    if options.gpu and meter.reason:
        print(f"How busy the GPU is cannot be told: {meter.reason}.")
    made = {name: nets[name]() for name in options.nets}
    say(
        *("net", "fed by", "records/s", "GPU busy", "records/s at hand", "waits for data", "cores to feed"),
        *("records/s without net", "loss"),
    )
    for feed in options.feeds:
        with feeds[feed]() as batches:
            held = hold(batches)
        held_step_s = {}
        for name, net in made.items():  # anew for each feed: Keras' step unpacks what is packed
            train(net, held, clock := Clock(options.seconds))
            held_step_s[name] = clock.took_s / clock.num_steps
        with feeds[feed]() as batches:
            take(batches, alone := Clock(options.seconds))
            for name, net in made.items():
                loss = train(net, batches, clock := Clock(options.seconds))
                busy = meter.busy_share(*clock.timed)
                waiting = 1 - held_step_s[name] * clock.num_steps / clock.took_s
                cores = alone.cpu_s / alone.num_steps * clock.num_steps / clock.took_s
                say(
                    name,
                    feed,
                    f"{clock.num_steps * options.batch_size / clock.took_s:,.0f}",
                    ("?" if options.gpu else "no GPU") if busy is None else f"{busy:.0%}",
                    f"{options.batch_size / held_step_s[name]:,.0f}",
                    f"{round(100 * waiting)}%",
                    f"{cores:.2f}",
                    f"{alone.num_steps * options.batch_size / alone.took_s:,.0f}",
                    f"{loss:.4f}",
                )


def say(*cells: str) -> None:
    print(COLUMNS.format(*cells), flush=True)
