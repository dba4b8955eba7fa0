"""What all tests share: an index cache of their own, and small shards whose records know their number."""

from __future__ import annotations

import gc
import logging
import os
import signal
import struct
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

import loaderd
from loaderd.kernels.crc import framed
from tests.helpers.numbered import SCHEMA, Numbered
from tests.helpers.programs import without_what_keras_imports
from tests.helpers.record_bytes import field, varint

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # before any test imports TensorFlow
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # no GPU, unless `make test-gpu` names one
# The threads of numpy's algebra, which no test needs, cost each process as much as the rest of numpy's import.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# `make test` tries the same examples each time, so it says the same of the same code. `make torture` tries others. A
# property whose examples start processes says what part of these it tries. How long an example takes says nothing
# on a machine that is busy.
_CHECKS = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
_MANY = settings(max_examples=2000, deadline=None, suppress_health_check=_CHECKS, print_blob=True)
settings.register_profile("many", _MANY)
settings.register_profile("few", _MANY, max_examples=300, derandomize=True)
_PHASES = [Phase.explicit, Phase.reuse, Phase.generate]
settings.register_profile("unshrunk", settings.get_profile("few"), phases=_PHASES)  # for mutants
settings.load_profile("few")
# What a shell starts in the background ignores Ctrl-C, and so would all that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and under nohup this


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """TensorFlow's import makes a million objects: to look for garbage among them was a quarter of its time."""
    gc.disable()
    try:
        with without_what_keras_imports():
            return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before those with the mark `slow` are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test with the mark `one_variant`, all variants but the first that is not `slow` are so, too."""
    begun = set()
    for item in items:
        name = item.nodeid.partition("[")[0]
        if item.get_closest_marker("one_variant") and not item.get_closest_marker("slow"):
            if name in begun:
                item.add_marker("slow")
            begun.add(name)


@pytest.fixture(autouse=True, scope="session")
def _own_index_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOADERD_CACHE_DIR", str(tmp_path_factory.mktemp("index-cache")))
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


# Their workers run with numpy alone, those of the other rooms with compiled code: what is promised holds with both.
# A daemon that compiles nothing starts with a quarter less CPU time.
_NUMPY_ROOMS = ("bindings", "cli", "client", "convert", "endings", "reliability", "remote", "schemas", "server")


@pytest.fixture(autouse=True, scope="module")
def _kernels_of_the_room(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if request.path.relative_to(Path(__file__).parent).parts[0] in _NUMPY_ROOMS:
            patch.setenv("LOADERD_KERNELS", "numpy")
        yield


@pytest.fixture(autouse=True, scope="module")
def _log_as_before() -> Iterator[None]:
    """A server's command that ran in this process has written its log to a standard error that is gone."""
    logger = logging.getLogger("loaderd")
    handlers = [*logger.handlers]
    yield
    logger.handlers[:] = handlers


@pytest.fixture(autouse=True, scope="module")
def _what_is_old_is_not_looked_at_again() -> None:
    """Of TensorFlow alone there are a million objects, and every full collection would visit them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def mirrored() -> Any:
    """A replica on each CPU of TensorFlow. Of two such strategies in one process, it confuses the collectives."""
    import tensorflow as tf

    return tf.distribute.MirroredStrategy([device.name for device in tf.config.list_logical_devices("CPU")])


def numbered_example(number: int) -> bytes:
    """A tf.train.Example: ``number`` as an int64, and its 32 bits, the most significant first, as two bytes each."""

    bits = field(0x0A, field(0x0A, b"bits") + field(0x12, field(0x0A, field(0x0A, struct.pack(">I", number)))))
    ids = field(0x0A, field(0x0A, b"id") + field(0x12, field(0x1A, field(0x0A, varint(number)))))
    return field(0x0A, bits + ids)


@pytest.fixture(scope="session")
def write_numbered_to() -> Callable[[Path, Sequence[int]], list[Path]]:
    """Writes shards of so many records each, numbered through from 0, in a folder; returns their paths."""

    def write(target: Path, sizes: Sequence[int]) -> list[Path]:
        target.mkdir(parents=True, exist_ok=True)
        number = 0
        paths = []
        for shard, size in enumerate(sizes):
            path = target / f"{shard:03}.tfrecord"
            path.write_bytes(b"".join(framed(numbered_example(number + i)) for i in range(size)))
            number += size
            paths.append(path)
        return paths

    return write


@pytest.fixture
def write_numbered(numbered: Numbered) -> Callable[[Sequence[int]], list[Path]]:
    """Of ``numbered``."""
    return numbered.write


@pytest.fixture(scope="session")
def run_together() -> Callable[[Sequence[Sequence[str]]], list[str]]:
    """Runs commands at the same time, which must all succeed; returns what each of them printed."""

    def run(commands: Sequence[Sequence[str]]) -> list[str]:
        processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
        try:
            printed = [process.communicate(timeout=60)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        assert [process.returncode for process in processes] == [0] * len(processes)
        return printed

    return run


@pytest.fixture
def numbered(tmp_path: Path, write_numbered_to: Callable[[Path, Sequence[int]], list[Path]]) -> Numbered:
    """Numbered shards in the test's own folder, and loaders of them."""
    return Numbered(tmp_path, write_numbered_to)


@pytest.fixture
def numbered_schema() -> loaderd.Schema:
    """Of ``numbered``."""
    return SCHEMA


@pytest.fixture
def check_batch() -> Callable[[loaderd.Batch], list[int]]:
    """Of ``numbered``."""
    return Numbered.check


@pytest.fixture(scope="module", params=["numpy", "compiled"])
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    """What finds frames, parses and unpacks: a test that uses this runs with both."""
    if request.param == "compiled":
        pytest.importorskip("llvmlite")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOADERD_KERNELS", request.param)
        yield request.param
