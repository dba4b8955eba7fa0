"""How many records a second reach a GPU unpacked, if they travel packed: by the batch's size and the workers.

::

    python bench/gpu_packed.py [--seconds 2] [--records 4000000] [--out results.jsonl] [--cases WAY:BATCH:WORKERS …]

The GPU adds up each batch's boards, and the loop waits for the sum of the batch before. Each case is measured in a
process of its own, and writes a line of JSON as soon as it is over:

``numpy``
    no GPU: ``Loader(…, unpack="device")`` alone, the rate at which packed batches come.
``torch_floats``, ``torch_packed``
    ``loaderd_torch.batches(loader, device="cuda")`` of the workers' floats, and of packed batches.
``jax_floats``, ``jax_packed``
    ``loaderd_jax.batches(loader, device=…)`` of both.
``torch_kernel``, ``torch_compiled``, ``jax_kernel``
    the unpacking alone, of one batch that is on the GPU already; ``torch_compiled``: by ``torch.compile``.
``torch_copy``
    copies of packed bytes out of pinned memory alone.

Without a GPU, ``--device cpu`` takes the CPU in its place.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from harness.comparison import warm_page_cache
from harness.synthetic import cached_shards

import loaderd
from loaderd.schema import packed_schema

SCHEMA = loaderd.schemas.chess_eval()
LIMIT_S = 90.0
CASES = [
    *(f"{way}:65536:1" for way in ("torch_copy", "torch_kernel", "torch_compiled", "jax_kernel")),
    *(
        f"{way}:{size}:{workers}"
        for way in ("numpy", "torch_packed")
        for size in (4096, 16384)
        for workers in (4, 8, 14)
    ),
    *(f"torch_floats:{size}:{workers}" for size, workers in ((1024, 8), (4096, 14))),
    *(f"jax_{kind}:{size}:14" for kind in ("packed", "floats") for size in (4096, 16384)),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--work-dir", type=Path, default=Path.home() / ".cache" / "loaderd-bench", help="for shards")
    parser.add_argument("--records", type=int, default=4_000_000)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--warmup-seconds", type=float, default=1.5)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=Path("gpu_packed.jsonl"))
    parser.add_argument("--cases", nargs="+", default=CASES, metavar="WAY:BATCH:WORKERS")
    parser.add_argument("--measure", help="one case, in this process; prints one JSON line")
    options = parser.parse_args()
    if options.measure:
        sys.stdout.write(json.dumps(measure(options.measure, options)) + "\n")
        return
    shards_of(options)
    with options.out.open("a") as file:
        for case in options.cases:
            command = [sys.executable, *sys.argv, "--measure", case]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
                failed = done.returncode != 0
                line = (
                    json.dumps({"case": case, "error": done.stderr[-1500:]})
                    if failed
                    else done.stdout.splitlines()[-1]
                )
            except subprocess.TimeoutExpired:
                line = json.dumps({"case": case, "error": f"took more than {LIMIT_S:g} s"})
            file.write(line + "\n")
            file.flush()
            print(line, flush=True)


def shards_of(options: argparse.Namespace) -> list[str]:
    paths = [str(path) for path in cached_shards(options.work_dir, options.records, num_shards=32)]
    warm_page_cache(paths)
    return paths


def measure(case: str, options: argparse.Namespace) -> dict[str, Any]:
    way, size, workers = case.split(":")
    library, _, kind = way.partition("_")
    if kind in ("kernel", "compiled", "copy"):
        return {
            "case": case,
            "records_per_s": {"torch": torch_alone, "jax": jax_alone}[library](kind, int(size), options),
        }
    with loaderd.Loader(
        shards_of(options),
        SCHEMA,
        batch_size=int(size),
        workers=int(workers),
        epochs=None,
        remainder="carry",
        unpack="worker" if kind == "floats" else "device",
    ) as loader:
        steps = {"torch": torch_steps, "jax": jax_steps, "numpy": numpy_steps}[library](loader, options)
        warm_until_s = time.perf_counter() + options.warmup_seconds
        while time.perf_counter() < warm_until_s:
            next(steps)
        began_s, began_cpu_s, num_batches = time.perf_counter(), time.process_time(), 0
        while time.perf_counter() - began_s < options.seconds:
            next(steps)
            num_batches += 1
        took_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
        return {
            "case": case,
            "records_per_s": round(num_batches * int(size) / took_s),
            "consumer_cpu_us_per_batch": round(cpu_s / num_batches * 1e6, 1),
            "cores": os.cpu_count(),
        }


def numpy_steps(loader: loaderd.Loader, options: argparse.Namespace) -> Iterator[None]:
    for _ in loader:
        yield


def torch_steps(loader: loaderd.Loader, options: argparse.Namespace) -> Iterator[None]:
    import loaderd_torch

    return add_up(loaderd_torch.batches(loader, device=options.device), lambda board: board.sum())


def jax_steps(loader: loaderd.Loader, options: argparse.Namespace) -> Iterator[None]:
    import jax
    import loaderd_jax

    device = jax.devices("gpu" if options.device == "cuda" else "cpu")[0]
    return add_up(loaderd_jax.batches(loader, device=device), jax.jit(lambda board: board.sum()))


def add_up(batches: Iterable[Any], total_of: Callable[[Any], Any]) -> Iterator[None]:
    before = None
    for batch in batches:
        total = total_of(batch["board"])
        if before is not None:
            float(before)
        before = total
        yield


def random_packed(size: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        name: rng.integers(0, 256, (size, spec.record_bytes), np.uint8).view(spec.dtype).reshape(size, *spec.shape)
        for name, spec in packed_schema(SCHEMA, for_device=True).specs.items()
    }


def torch_alone(kind: str, size: int, options: argparse.Namespace) -> float:
    import torch
    from loaderd_torch.unpack import Unpacker

    packed = {name: torch.from_numpy(array) for name, array in random_packed(size).items()}
    if kind == "copy":
        host = packed["d"].pin_memory()
        return timed(lambda: host.to(options.device, non_blocking=True), torch.cuda.synchronize, size)
    unpack: Any = Unpacker(SCHEMA.device_program(), list(SCHEMA.fields), torch.device(options.device))
    if kind == "compiled":
        unpack = torch.compile(unpack.__call__)
    there = {name: tensor.to(options.device) for name, tensor in packed.items()}
    return timed(lambda: unpack(there), torch.cuda.synchronize, size)


def jax_alone(kind: str, size: int, options: argparse.Namespace) -> float:
    import jax
    from loaderd_jax.unpack import Unpacker

    unpack = Unpacker(SCHEMA.device_program(), list(SCHEMA.fields))
    there = {name: jax.device_put(array) for name, array in random_packed(size).items()}
    last: list[Any] = []

    def run() -> None:
        last[:] = [unpack(there)]

    return timed(run, lambda: jax.block_until_ready(last), size)


def timed(run: Callable[[], Any], wait: Callable[[], Any], size: int) -> float:
    for _ in range(3):
        run()
    wait()
    began_s, count = time.perf_counter(), 50
    for _ in range(count):
        run()
    wait()
    return round(count * size / (time.perf_counter() - began_s))


if __name__ == "__main__":
    main()
