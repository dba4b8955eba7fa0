"""The measured process: reads a job from standard input, runs one candidate, prints one JSON line.

``run_candidate.py`` starts it once for each measurement, so that no candidate inherits another's threads, memory or
imports. A job is ``{"candidate": …, "config": {…}, "timing": {…} or null}``; without a timing one epoch is
read and digested instead of timed. Where the candidate cannot do the job, the line is ``{"left_out": reason}``.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

import numpy as np

from harness.digest import Digest
from harness.interface import Config, Step, load, why_not
from harness.process_tree import CpuMeter, cpu_s_by_name, process_tree
from loaderd import Schema

_VERSIONED = ("numpy", "tensorflow", "torch", "jax", "grain", "spdl", "loaderd")


@dataclass(frozen=True)
class Timing:
    """When to measure: after the warm-up, until both ``examples`` and ``seconds`` have been reached."""

    examples: int = 1
    seconds: float = 3.0
    warmup_steps: int = 5
    warmup_s: float = 1.5


FIRST_BATCH = Timing(examples=1, seconds=0.0, warmup_steps=0, warmup_s=0.0)  # plus one batch; rates mean nothing


def measure(stream: Iterator[Step], timing: Timing, batch_size: int) -> dict[str, Any]:
    """Time ``stream``; the keys of the result are described in bench/README.md. Raises RuntimeError if it ends."""
    opened = time.perf_counter()
    _take(stream)
    time_to_first_batch_s = time.perf_counter() - opened
    warm, steps = time.perf_counter(), 0
    while steps < timing.warmup_steps or time.perf_counter() - warm < timing.warmup_s:
        _take(stream)
        steps += 1

    by_name = cpu_s_by_name(process_tree(os.getpid()))
    meter, own_cpu, started = CpuMeter(), time.process_time(), time.perf_counter()
    examples, seconds = 0, 0.0
    while examples < timing.examples or seconds < timing.seconds:
        examples += _take(stream)
        seconds = time.perf_counter() - started
    own_cpu = time.process_time() - own_cpu
    tree_cpu, other_cores = meter.read()
    by_name_now = cpu_s_by_name(process_tree(os.getpid()))

    return {
        "examples": examples,
        "seconds": seconds,
        "examples_per_s": examples / seconds,
        "time_to_first_batch_s": time_to_first_batch_s,
        "consumer_cpu_s": own_cpu,
        "total_cpu_s": tree_cpu,
        "cpu_s_by_process": {name: cpu - by_name.get(name, 0.0) for name, cpu in by_name_now.items()},
        "other_cores": other_cores,
        "consumer_cpu_us_per_batch": own_cpu / examples * batch_size * 1e6,
        "total_cpu_us_per_example": tree_cpu / examples * 1e6,
    }


def _take(stream: Iterator[Step]) -> int:
    """The examples of the next step; one element of each array is read, so that the memory is really there."""
    step = next(stream, None)
    if step is None:
        raise RuntimeError("the candidate ended before the measurement did; it must go on for ever")
    for array in (step.batch or {}).values():
        np.asarray(array).item(0)
    return step.examples


def digest(stream: Iterator[Step], schema: Schema) -> dict[str, int] | None:
    """The digest of all that ``stream`` delivers; None if its steps carry no batch."""
    found = Digest()
    for step in stream:
        if step.batch is None:
            return None
        found = found.updated(schema, step.batch)
    return asdict(found)


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Do one job. Returns what to print."""
    config = Config(**{**job["config"], "shards": tuple(job["config"]["shards"])})
    if not config.compiled:
        os.environ["LOADERD_KERNELS"] = "numpy"
    importing = time.perf_counter()
    try:
        candidate = load(job["candidate"])
    except ModuleNotFoundError as error:
        return {"left_out": f"needs {error.name}, which is not installed"}
    import_s = time.perf_counter() - importing
    reason = why_not(candidate, config)
    if reason is not None:
        return {"left_out": reason}
    with closing(candidate.steps(config)) as stream:
        if job["timing"] is None:
            result: dict[str, Any] = {"digest": digest(stream, config.delivered())}
        else:
            result = {"import_s": import_s, **measure(stream, Timing(**job["timing"]), config.batch_size)}
    dtype = config.dtype if config.has_dtype() else "as the schema says"
    about = {"delivered": "packed" if config.packed else dtype, "note": getattr(candidate, "NOTE", "")}
    return {**result, **about, "versions": versions()}


def versions() -> dict[str, str]:
    """The versions of Python, of what is imported of ``_VERSIONED``, and of llvmlite if loaderd may use it."""
    found = {"python": platform.python_version()}
    distributions = metadata.packages_distributions()
    for name in _VERSIONED:
        if name in sys.modules:
            installed = distributions.get(name)
            found[name] = metadata.version(installed[0]) if installed else sys.modules[name].__version__
    if os.environ.get("LOADERD_KERNELS") != "numpy" and "llvmlite" in distributions:
        found["llvmlite"] = metadata.version("llvmlite")  # used in the workers
    return found


def end_with(pipe: int) -> None:
    """Have this process group killed when the other end of ``pipe`` is closed: when the benchmark has died.

    With all that a candidate has started, which has another parent. The kernel does it: a candidate may wait where no
    handler of Python's runs, and may fork, so that there must be no thread.
    """
    fcntl.fcntl(pipe, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, os.O_ASYNC)
    if select.select([pipe], [], [], 0)[0]:  # it was closed before the kernel was told
        os.killpg(0, signal.SIGKILL)


def main() -> None:
    end_with(int(sys.argv[1]))
    result = run(json.load(sys.stdin))
    sys.stdout.write("\n" + json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
