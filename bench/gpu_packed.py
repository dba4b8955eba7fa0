"""How many records a second reach a GPU and are unpacked there, by the library, the batch's size and the workers.

::

    python bench/gpu_packed.py [--minutes 8] [--libraries torch jax tf] [--cases WAY:BATCH:WORKERS …] [--out NAME]

Each case is a line of JSON in NAME.jsonl as soon as it is measured, the most telling ones first. At the end, and
after Ctrl-C, there is a table, and where the time goes at the best point. What the minutes do not reach is left out,
and named. The GPU adds up each batch's boards, and the loop waits for the sum of the batch before. LIBRARY is torch,
jax or tf:

``LIBRARY_own``
    floats by the library's own loader: PyTorch's DataLoader that pins, and ``.to("cuda", non_blocking=True)``;
    threads with numpy and ``jax.device_put``; tf.data compiled by XLA, unshuffled, with ``prefetch_to_device``.
``LIBRARY_floats``, ``LIBRARY_packed``
    ``batches(loader, device=…)`` of loaderd's binding: the workers' floats, and with ``unpack="device"``.
``LIBRARY_kernel``, ``torch_compiled``
    the unpacking alone, of one batch that is on the GPU already; ``torch_compiled``: by ``torch.compile``.
``torch_copy``
    copies of packed bytes out of pinned memory alone.
``numpy_packed``, ``numpy_read``
    no GPU: ``Loader(…, unpack="device")`` alone; reading the shards out of the page cache alone, as many processes.

Without a GPU, the CPU takes its place, sizes are small, and the table says so. What a training makes of it:
``make demo-gpu``.
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from queue import Queue
from tempfile import TemporaryFile
from threading import Thread
from typing import Any

import numpy as np
from harness.interface import Config
from harness.measured import versions
from harness.process_tree import cpu_s_by_name, process_tree
from harness.questions import console_of, shards_of
from harness.report import markdown
from harness.rounds import circumstances_of
from rich.console import Console
from rich.table import Table

import loaderd
from loaderd.schema import packed_schema

SCHEMA = loaderd.schemas.chess_eval()
PACKED = packed_schema(SCHEMA, for_device=True)
PACKED_BYTES = sum(spec.record_bytes for spec in PACKED.specs.values())
LIBRARIES = {"torch": "torch", "jax": "jax", "tf": "tensorflow"}
WAYS = {f"{library}_{kind}" for library in LIBRARIES for kind in ("own", "floats", "packed", "kernel")}
WAYS |= {"torch_copy", "torch_compiled", "numpy_packed", "numpy_read"}
CASE_LIMIT_S = 60.0
READ_BYTES = 4 << 20
STAGES = ("read", "frames", "check", "parse", "order", "fill", "fields")
COLUMNS = ("case", "batch", "workers", "records/s", "GB/s if unpacked", "consumer's CPU µs/batch", "first sum")
NO_GPU = "NO GPU HERE: the CPU took its place, beside what feeds it. Nothing in this table was measured on a GPU"

Run = dict[str, Any]
Batch = Any  # a mapping: name -> array of the library's


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--minutes", type=float, default=8.0, help="of all cases together; making shards comes before"
    )
    parser.add_argument("--libraries", nargs="+", choices=LIBRARIES, metavar="LIBRARY", help="default: the installed")
    parser.add_argument("--cases", nargs="+", metavar="WAY:BATCH:WORKERS", help="default: see --list")
    parser.add_argument("--list", action="store_true", help="the cases that would be measured, in order")
    parser.add_argument("--records", type=int, help="of the shards that are made (4,000,000; on a CPU 200,000)")
    parser.add_argument("--seconds", type=float, help="of each case (2; on a CPU 0.5)")
    parser.add_argument("--device", choices=["auto", "gpu", "cpu"], default="auto")
    parser.add_argument("--work-dir", type=Path, default=Path.home() / ".cache" / "loaderd-bench", help="for shards")
    parser.add_argument("--out", type=Path, default=Path("gpu_packed"), help="NAME of NAME.jsonl and NAME.md")
    parser.add_argument("--measure", nargs="+", help="these cases, in this process; prints a line of JSON each")
    options = parser.parse_args()
    if options.device == "auto":
        options.device = "gpu" if gpus() else "cpu"
    options.records = options.records or (4_000_000 if options.device == "gpu" else 200_000)
    options.seconds = options.seconds or (2.0 if options.device == "gpu" else 0.5)
    if options.measure:
        measure_all(options)
        return
    cases = options.cases or cases_of(options)
    for case in cases:
        way, *sizes = case.split(":")
        if way not in WAYS or len(sizes) != 2 or not all(map(str.isdecimal, sizes)):
            parser.error(f"a case is WAY:BATCH:WORKERS, got {case}; ways are {', '.join(sorted(WAYS))}")
    if options.list:
        print("\n".join(cases))
        return
    print(f"making and indexing {options.records:,} records in {options.work_dir}", flush=True)
    shards_of(options, num_shards=32)
    runs: list[Run] = []
    try:
        with options.out.with_suffix(".jsonl").open("w") as log:
            for run in run_cases(cases, options):
                runs.append(run)
                log.write(json.dumps(run) + "\n")
                log.flush()
                said = run["error"].splitlines()[-1] if "error" in run else f"{run['records_per_s']:14,} records/s"
                print(f"{run['case']:26} {said}", flush=True)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    sys.exit(0 if publish(cases, runs, options) else 1)


def gpus() -> str:
    """What ``nvidia-smi`` says is here, or ""."""
    try:
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


# ------------------------------------------------------------------------------------------------- the cases


def cases_of(options: argparse.Namespace) -> list[str]:
    """Each library's telling cases first, then its other sizes."""
    libraries = options.libraries or [name for name, package in LIBRARIES.items() if find_spec(package)]
    cores = len(os.sched_getaffinity(0))
    workers = [4, 8, 16] if options.device == "gpu" else sorted({1, cores})
    sizes = [4096, 16384, 65536] if options.device == "gpu" else [1024, 4096]
    most, largest = workers[-1], sizes[-1]
    small = 1024 if options.device == "gpu" else 512  # as one has with floats
    telling = [f"numpy_read:{largest}:{most}", f"numpy_packed:{largest}:{most}"]
    for library in libraries:
        if library == "torch" and options.device == "gpu":
            telling.append(f"torch_copy:{largest}:0")
        telling.append(f"{library}_kernel:{largest}:0")
        telling += [f"{library}_packed:{largest}:{most}", f"{library}_packed:{sizes[-2]}:{workers[-2]}"]
        telling += [f"{library}_floats:{small}:{workers[-2]}", f"{library}_own:{small}:{most}"]
    others = [
        f"{way}:{size}:{count}"
        for way in (*(f"{library}_packed" for library in libraries), "numpy_packed")
        for size in reversed(sizes)
        for count in reversed(workers)
    ]
    others += [f"{library}_{kind}:4096:{most}" for library in libraries for kind in ("floats", "own")]
    if "torch" in libraries and options.device == "gpu":
        others.append(f"torch_compiled:{largest}:0")
    return [*telling, *(case for case in dict.fromkeys(others) if case not in telling)]


def run_cases(cases: Sequence[str], options: argparse.Namespace) -> Iterator[Run]:
    """The runs of cases. A process measures those that follow each other with one library, until one fails."""
    deadline_s = time.monotonic() + options.minutes * 60
    left = list(cases)
    while left and time.monotonic() < deadline_s:
        _, group = next(groupby(left, library_of))
        command = [sys.executable, *sys.argv, "--device", options.device, "--measure", *group]
        environment = {"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ}
        if options.device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        with (
            TemporaryFile("w+") as errors,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment) as process,
        ):
            try:
                for line in process.stdout or ():
                    del left[0]
                    yield json.loads(line)
                    if time.monotonic() > deadline_s:
                        return
            finally:
                process.terminate()
            if process.wait() != 0:
                errors.seek(0)
                yield {"case": left.pop(0), "error": errors.read()[-3000:].strip() or f"status {process.returncode}"}


def library_of(case: str) -> str:
    return case.partition("_")[0]


def measure_all(options: argparse.Namespace) -> None:
    shards = shards_of(options, num_shards=32)
    for case in options.measure:
        faulthandler.dump_traceback_later(CASE_LIMIT_S, exit=True)
        way, size, workers = case.split(":")
        library, _, kind = way.partition("_")
        if kind == "read":
            run = read_alone(shards, int(workers))
        elif kind in ("copy", "kernel", "compiled"):
            run = alone(library, kind, int(size), options)
        else:
            run = batches_by(library, kind, shards, int(size), int(workers), options)
        print(json.dumps({"case": case, **run, "versions": versions()}), flush=True)


# ------------------------------------------------------------------------------------------- batch after batch


def batches_by(
    library: str, kind: str, shards: Sequence[str], size: int, workers: int, options: argparse.Namespace
) -> Run:
    """How fast batches come to the device; of loaderd's, what each stage took."""
    config = Config(tuple(shards), batch_size=size, workers=workers, shuffle=library != "tf")
    with ExitStack() as stack:
        loader = None
        if kind != "own":
            loader = stack.enter_context(
                loaderd.Loader(
                    list(shards),
                    SCHEMA,
                    batch_size=size,
                    workers=workers,
                    epochs=None,
                    remainder="carry",
                    unpack="worker" if kind == "floats" else "device",
                )
            )
        batches, add_up = TAKEN_BY[library](config if loader is None else loader, options.device)
        sums = sums_of(batches, add_up)
        first_sum, warm_until_s = float(next(sums)), time.perf_counter() + options.seconds * 0.75
        while time.perf_counter() < warm_until_s:
            next(sums)
        before = counts(loader)
        began_s, num_batches = time.perf_counter(), 0
        while (took_s := time.perf_counter() - began_s) < options.seconds:
            next(sums)
            num_batches += 1
        records = num_batches * size
        spent_ns = {name: (count - before.get(name, 0.0)) / records * 1e9 for name, count in counts(loader).items()}
        sums.close()
    return {
        "records_per_s": round(records / took_s),
        "consumer_cpu_us_per_batch": round(spent_ns.pop("consumer") * size / 1e3, 1),
        "first_sum": None if kind == "own" or library == "numpy" else first_sum,
        # Short stages are sampled, and "order" is a rest: over some seconds they may come out below 0.
        "ns_per_record": {name: round(max(0.0, ns), 2) for name, ns in spent_ns.items()},
    }


def counts(loader: loaderd.Loader | None) -> dict[str, float]:
    """Seconds until now: of each stage in all workers together, and of CPU time of each kind of process."""
    by_name = cpu_s_by_name(process_tree(os.getpid()))
    found = {"consumer": time.process_time(), "daemon": by_name.get("loaderd-daemon", 0.0)}
    if loader is not None:
        statistics = loader.statistics()
        found |= {stage: statistics.stage_s.get(stage, 0.0) for stage in STAGES}
        found["fields"] = sum(statistics.field_s.values())
    return found


Sum = tuple[Any, Callable[[], Any]]  # of a batch; and what waits for it
Taken = tuple[Iterable[Batch], Callable[[Batch], Sum]]  # batches, and what has the device add up one


def sums_of(batches: Iterable[Batch], add_up: Callable[[Batch], Sum]) -> Iterator[Any]:
    """The sum of each batch; that of the next one has been asked for already."""
    before = None
    for batch in batches:
        after = add_up(batch)
        if before is not None:
            total, wait = before
            wait()
            yield total
        before = after


def numpy_batches(source: Any, device: str) -> Taken:
    return source, lambda batch: (batch["d"][-1, -1], lambda: None)


def torch_batches(source: Any, device: str) -> Taken:
    import torch

    place = "cuda" if device == "gpu" else "cpu"
    if isinstance(source, Config):
        from candidates import torch_dataloader

        steps = torch_dataloader.steps(source, pin_memory=device == "gpu")
        batches = (
            {name: tensor.to(place, non_blocking=True) for name, tensor in step.batch.items()} for step in steps
        )
    else:
        import loaderd_torch

        batches = loaderd_torch.batches(source, device=place)

    def add_up(batch: Batch) -> Sum:
        total = batch["board"].sum()
        if device == "cpu":
            return total, lambda: None
        return total, torch.cuda.current_stream().record_event().synchronize  # item() would wait for later ones

    return batches, add_up


def jax_batches(source: Any, device: str) -> Taken:
    import jax

    place = jax.devices(device)[0]
    if isinstance(source, Config):
        batches = batches_of_threads(source, lambda batch: jax.device_put(batch, place))
    else:
        import loaderd_jax

        batches = loaderd_jax.batches(source, device=place)
    sum_of = jax.jit(lambda board: board.sum())

    def add_up(batch: Batch) -> Sum:
        total = sum_of(batch["board"])
        return total, total.block_until_ready

    return batches, add_up


def batches_of_threads(config: Config, put: Callable[[Batch], Batch]) -> Iterator[Batch]:
    """Floats by numpy in threads, each with a share of the files."""
    from candidates._records import batches, unpack

    ahead = Queue[Batch](2 * config.workers)

    def fill(number: int) -> None:
        for rows in batches(config, number, config.workers):
            ahead.put(put(unpack(rows, "float32")))

    for number in range(config.workers):
        Thread(target=fill, args=(number,), daemon=True).start()
    while True:
        yield ahead.get()


def tf_batches(source: Any, device: str) -> Taken:
    import tensorflow as tf

    place = "/GPU:0" if device == "gpu" else "/CPU:0"
    if device == "gpu" and not tf.config.list_physical_devices("GPU"):
        sys.exit("TensorFlow finds no GPU")
    if isinstance(source, Config):
        from candidates import tfdata_xla
        from candidates._tfdata import decoded, decoder

        batches = decoded(source, decoder(source, tfdata_xla.unpack))
        if device == "gpu":
            batches = batches.apply(tf.data.experimental.prefetch_to_device(place, buffer_size=2))
    else:
        import loaderd_tf

        batches = loaderd_tf.batches(source, device=place)

    @tf.function
    def sum_of(board: tf.Tensor) -> tf.Tensor:
        with tf.device(place):
            return tf.reduce_sum(board)

    def add_up(batch: Batch) -> Sum:
        total = sum_of(batch["board"])
        return total, total.numpy

    return batches, add_up


TAKEN_BY = {"numpy": numpy_batches, "torch": torch_batches, "jax": jax_batches, "tf": tf_batches}


# ----------------------------------------------------------------------------------------------- one thing alone


def read_alone(shards: tuple[str, ...], workers: int) -> Run:
    """How fast so many processes read the shards' bytes, out of the page cache."""
    with ProcessPoolExecutor(workers) as processes:
        list(processes.map(read_file, shards * 2))  # they have started
        began_s = time.perf_counter()
        num_bytes = sum(processes.map(read_file, shards * 4, chunksize=4))
        took_s = time.perf_counter() - began_s
    return {"records_per_s": round(num_bytes / record_bytes(shards) / took_s)}


def read_file(path: str) -> int:
    """The bytes of a file, read as loaderd reads."""
    buffer, at = read_buffer(), 0
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            at += count
    return at


@functools.cache
def read_buffer() -> bytearray:
    return bytearray(READ_BYTES)


def record_bytes(shards: Sequence[str]) -> float:
    """The mean bytes of a record with its frame."""
    with loaderd.Loader(list(shards), SCHEMA, batch_size=512, workers=1) as loader:
        return sum(os.path.getsize(path) for path in shards) / loader.statistics().num_records


def random_packed(size: int) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    return {
        name: rng.integers(0, 256, (size, spec.record_bytes), np.uint8).view(spec.dtype).reshape(size, *spec.shape)
        for name, spec in PACKED.specs.items()
    }


def alone(library: str, kind: str, size: int, options: argparse.Namespace) -> Run:
    """How fast a copy to the device is, or the unpacking there."""
    run, wait = {"torch": torch_alone, "jax": jax_alone, "tf": tf_alone}[library](kind, size, options.device)
    for _ in range(3):
        last = run()
    wait(last)
    began_s, count = time.perf_counter(), 0
    while count == 0 or time.perf_counter() - began_s < options.seconds / 2:
        for _ in range(10):
            last = run()
        wait(last)
        count += 10
    return {"records_per_s": round(count * size / (time.perf_counter() - began_s))}


def torch_alone(kind: str, size: int, device: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    import torch
    from loaderd_torch.unpack import Unpacker

    place = torch.device("cuda" if device == "gpu" else "cpu")
    wait = torch.cuda.synchronize if device == "gpu" else lambda: None
    packed = {name: torch.from_numpy(array) for name, array in random_packed(size).items()}
    if kind == "copy":
        pinned = {name: tensor.pin_memory() for name, tensor in packed.items()}
        return lambda: [tensor.to(place, non_blocking=True) for tensor in pinned.values()], lambda _: wait()
    unpack: Any = Unpacker(SCHEMA.device_program(), list(SCHEMA.fields), place)
    if kind == "compiled":
        unpack = torch.compile(unpack.__call__)
    there = {name: tensor.to(place) for name, tensor in packed.items()}
    return lambda: unpack(there), lambda _: wait()


def jax_alone(kind: str, size: int, device: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    import jax
    from loaderd_jax.unpack import Unpacker

    unpack = Unpacker(SCHEMA.device_program(), list(SCHEMA.fields))
    place = jax.devices(device)[0]
    there = {name: jax.device_put(array, place) for name, array in random_packed(size).items()}
    return lambda: unpack(there), jax.block_until_ready


def tf_alone(kind: str, size: int, device: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    import loaderd_tf
    import tensorflow as tf

    with tf.device("/GPU:0" if device == "gpu" else "/CPU:0"):
        there = {name: tf.identity(array) for name, array in random_packed(size).items()}
        unpack = tf.function(lambda packed: loaderd_tf.unpack(packed, SCHEMA)["board"], jit_compile=True)
    return lambda: unpack(there), lambda board: float(board[-1, -1, -1, -1])


# -------------------------------------------------------------------------------------------------- the table


def publish(cases: Sequence[str], runs: Sequence[Run], options: argparse.Namespace) -> bool:
    """Print the table, and write it to NAME.md. Returns whether all loaderd's first batches of a size are equal."""
    measured = [run for run in runs if "error" not in run]
    by_case = {run["case"]: run for run in measured}
    rows = [row_of(run) for run in measured]
    facts = {
        "GPU": gpus() if options.device == "gpu" else NO_GPU,
        **circumstances_of(measured),
        "command": f"`{shlex.join(['python', *sys.argv])}`",
    }
    if failed := [run["case"] for run in runs if "error" in run]:
        facts["failed"] = ", ".join(failed)
    if left := cases[len(runs) :]:
        facts["not measured, for want of time"] = ", ".join(left)
    sums: dict[str, set[float]] = {}
    for run in measured:
        if run.get("first_sum") is not None:
            sums.setdefault(run["case"].split(":")[1], set()).add(run["first_sum"])
    differ = [size for size, values in sums.items() if len(values) > 1]
    if differ:
        facts["WRONG"] = f"first batches of {', '.join(differ)} records differ"
    console = console_of()
    page = [markdown(COLUMNS, rows, facts)]
    show(console, COLUMNS, rows)
    for library in LIBRARIES:
        packed = [run for run in measured if run["case"].startswith(f"{library}_packed")]
        if packed:
            best = max(packed, key=lambda run: run["records_per_s"])
            title, columns, stages = f"Where the time goes in {best['case']}", *stages_of(best, by_case)
            console.print(title)
            show(console, columns, stages)
            page.append(markdown(columns, stages, {title: f"{best['records_per_s']:,} records/s"}))
    for name, fact in facts.items():
        console.print(f"{name}: {fact}", markup=False, highlight=False)
    options.out.with_suffix(".md").write_text("\n".join(page))
    return not differ


def row_of(run: Run) -> tuple[str, ...]:
    way, size, workers = run["case"].split(":")
    float_bytes = sum(spec.record_bytes for spec in SCHEMA.specs.values())
    cpu_us, first_sum = run.get("consumer_cpu_us_per_batch"), run.get("first_sum")
    return (
        way,
        f"{int(size):,}",
        workers,
        f"{run['records_per_s']:,}",
        "" if cpu_us is None else f"{run['records_per_s'] * float_bytes / 1e9:.1f}",
        "" if cpu_us is None else f"{cpu_us:,.0f}",
        "" if first_sum is None else f"{first_sum:g}",
    )


def stages_of(best: Run, by_case: dict[str, Run]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """What each stage takes a record, and how many records a second it would let through by itself."""
    way, size, workers = best["case"].split(":")
    library = library_of(way)
    rows = []

    def add(stage: str, ns: float, at_once: int = 1) -> None:
        rows.append((stage, f"{ns:.1f}", f"{at_once / ns * 1e9:,.0f}" if ns else "no limit"))

    def add_rate(stage: str, case: str) -> None:
        if case in by_case:
            add(stage, 1e9 / by_case[case]["records_per_s"])

    spent = best["ns_per_record"]
    reads = next((case for case in by_case if case.startswith("numpy_read")), "")
    add_rate("page cache: reading alone", reads)
    for stage in STAGES:
        add(f"workers: {stage}", spent[stage], int(workers))
    add(f"workers, all: {workers} of them", sum(spent[stage] for stage in STAGES), int(workers))
    add("daemon: CPU", spent["daemon"])
    add("consumer: CPU", best["consumer_cpu_us_per_batch"] / int(size) * 1e3)
    add_rate("the loader alone", f"numpy_packed:{size}:{workers}")
    add_rate(f"PCIe: {PACKED_BYTES} bytes", next((case for case in by_case if case.startswith("torch_copy")), ""))
    add_rate("unpacking alone", next((case for case in by_case if case.startswith(f"{library}_kernel")), ""))
    return ("stage", "ns a record", "by itself, records/s"), rows


def show(console: Console, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    table = Table(*columns)
    for column in table.columns[1:]:
        column.justify = "right"
    for cells in rows:
        table.add_row(*cells)
    console.print(table)


if __name__ == "__main__":
    main()
