"""Anonymous memory: shared by descriptor, without a name, and gone with its last view."""

from __future__ import annotations

import errno
import gc
import itertools
import mmap
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loaderd.errors import DaemonError
from loaderd.shm.anonymous import SharedMemory, make_private, mapped


def mappings(name: str) -> int:
    """How often a memory of that name is mapped into this process."""
    return Path("/proc/self/maps").read_text().count(f"/memfd:loaderd-{name} (deleted)")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def reader_of(memory: SharedMemory) -> SharedMemory:
    return SharedMemory(os.open(f"/proc/self/fd/{memory.fd}", os.O_RDONLY))


@pytest.mark.parametrize("size", [0, 1, 4096, 10_000, 40 << 20])
def test_new_memory_is_zeroed_and_shared_by_descriptor(size: int):
    memory = SharedMemory.create("size", size)
    assert len(memory.bytes) == max(size, 1) and not memory.bytes.any() and memory.bytes.ctypes.data % 4096 == 0
    memory.bytes[-1] = 7
    other = SharedMemory(os.dup(memory.fd))
    assert other.bytes[-1] == 7 and len(other.bytes) == len(memory.bytes)


def test_it_is_gone_with_its_last_view_and_its_descriptor():
    gc.collect()
    before = descriptors()
    memory = SharedMemory.create("gone", 10_000)
    view = memory.bytes[100:200].reshape(10, 10)[3]
    assert mappings("gone") == 1 and not os.path.exists("/dev/shm/loaderd-gone")
    memory.close_fd()
    memory.close_fd()
    del memory
    gc.collect()
    view[:] = 5
    assert mappings("gone") == 1
    del view
    gc.collect()
    assert mappings("gone") == 0 and descriptors() == before
    memory = SharedMemory.create("dropped", 100)
    del memory
    assert descriptors() == before


def test_another_process_sees_it_and_its_children_do_not():
    memory = SharedMemory.create("passed", 10_000)
    memory.bytes[:3] = (1, 2, 3)
    code = f"""
import os
from loaderd.shm.anonymous import SharedMemory
memory = SharedMemory({memory.fd})
assert memory.bytes[:3].tolist() == [1, 2, 3]
memory.bytes[5000] = 42
"""
    subprocess.run([sys.executable, "-c", code], pass_fds=[memory.fd], check=True)
    assert memory.bytes[5000] == 42
    code = f"import os; os.fstat({memory.fd})"
    found = subprocess.run([sys.executable, "-c", code], close_fds=False, stderr=subprocess.PIPE, check=False)
    assert b"Bad file descriptor" in found.stderr, "what is not passed is closed on exec"


def test_memory_that_cannot_be_had_leaves_no_descriptor():
    gc.collect()
    before = descriptors()
    with pytest.raises(DaemonError, match=r"cannot allocate 4,398,046,511,104 MiB of shared memory: ."):
        SharedMemory.create("too much", 1 << 62)
    assert descriptors() == before


@pytest.mark.parametrize("failing", range(3))
def test_none_of_several_descriptors_is_left(failing: int, monkeypatch: pytest.MonkeyPatch):
    one = SharedMemory.create("several", 100)
    gc.collect()
    before = descriptors()
    fds = [os.dup(one.fd) for _ in range(3)]
    real, calls = mmap.mmap, itertools.count()

    def fail_once(*of: Any, **how: Any) -> mmap.mmap:
        if next(calls) == failing:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return real(*of, **how)

    monkeypatch.setattr(mmap, "mmap", fail_once)
    with pytest.raises(DaemonError, match=r"cannot allocate \d MiB of shared memory"):
        mapped(*fds)
    monkeypatch.undo()
    gc.collect()
    assert descriptors() == before


def test_a_descriptor_for_reading_gives_a_mapping_for_reading():
    memory = SharedMemory.create("read", 100)
    reader = reader_of(memory)
    assert memory.writable and not reader.writable
    memory.bytes[5] = 7
    assert reader.bytes[5] == 7
    with pytest.raises(ValueError, match="read-only"):
        reader.bytes[5] = 8


def test_nobody_can_cut_it_off():
    memory = SharedMemory.create("sealed", 10_000)
    for size in (0, 20_000):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.fd, size)
    memory.bytes[-1] = 1


def test_pages_become_private_in_place():
    memory = SharedMemory.create("private", 12_288)
    reader = reader_of(memory)
    memory.bytes[:] = 1
    before = [view.ctypes.data for view in (reader.bytes, reader.bytes[4096:8192])]
    make_private(before[1], 4096)
    make_private(before[1], 4096)
    memory.bytes[:] = 2
    assert before == [view.ctypes.data for view in (reader.bytes, reader.bytes[4096:8192])]
    assert [set(part.tolist()) for part in np.split(reader.bytes, 3)] == [{2}, {1}, {2}]


def test_private_pages_go_with_the_mapping():
    def resident_and_mappings() -> tuple[int, int]:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * mmap.PAGESIZE, len(Path("/proc/self/maps").read_text().splitlines())

    for turn in range(50):
        memory = SharedMemory.create("private", 3 << 20)
        memory.bytes[:] = 1
        view = memory.bytes[1 << 20 : 2 << 20]
        make_private(view.ctypes.data, view.nbytes)
        del memory
        assert view.all()
        del view
        if turn == 2:
            before = resident_and_mappings()
    resident, number = resident_and_mappings()
    assert resident < before[0] + (8 << 20) and number <= before[1] + 2


def test_a_thread_that_reads_sees_nothing_of_it():
    memory = SharedMemory.create("private", 1 << 16)
    memory.bytes[:] = 7
    is_over, wrong = threading.Event(), list[bool]()

    def read() -> None:
        while not is_over.is_set():
            if not (memory.bytes == 7).all():
                wrong.append(True)

    thread = threading.Thread(target=read)
    thread.start()
    for _ in range(300):
        make_private(memory.bytes.ctypes.data, 1 << 16)
    is_over.set()
    thread.join()
    assert not wrong


def test_what_cannot_be_had_in_place_is_an_error_and_leaves_nothing():
    def mapped_mib() -> int:
        return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE >> 20

    memory = SharedMemory.create("private", 2 << 20)
    before = mapped_mib()
    for _ in range(50):
        with pytest.raises(DaemonError, match="cannot allocate 1 MiB of memory: Invalid argument"):
            make_private(memory.bytes.ctypes.data + 1, 1 << 20)  # it is no page's address
    assert mapped_mib() < before + 40


def test_memory_that_may_not_be_locked_is_told_from_a_lack_of_processes(monkeypatch: pytest.MonkeyPatch):
    """mmap(2) says EAGAIN where the process has called mlockall, as fork(2) does where there are too many."""

    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(DaemonError, match="cannot allocate 1 MiB of shared memory") as caught:
        SharedMemory.create("test", 1 << 20)
    assert caught.value.hint == "This process locks its memory: raise `ulimit -l`."
