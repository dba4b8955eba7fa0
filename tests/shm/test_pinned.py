"""Pinned memory: what the driver is told, and when. (With a GPU, the tests of the bindings copy out of it.)"""

from __future__ import annotations

import ctypes
import gc
import logging
import mmap
import os
from pathlib import Path
from typing import Any

import pytest

import loaderd
from loaderd.client.batch import SlotReader
from loaderd.shm import pinned
from loaderd.shm.anonymous import SharedMemory
from loaderd.shm.layout import SlotLayout
from loaderd.shm.pinned import pin

SIZE = 8 * mmap.PAGESIZE


class Driver:
    """The part of CUDA's driver that is called. It notes what is pinned, and whether it was mapped when it ceased."""

    def __init__(self) -> None:
        self.used: tuple[int, ...] = (1,)
        """The GPUs, of three, of which this process has the primary context."""
        self.result = 0
        """Of what asks to pin."""
        self.current: list[int] = []
        self.retained = 0
        self.pinned: dict[int, int] = {}
        self.unpinned: list[bool] = []

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = 3
        return 0

    def cuDeviceGet(self, device: Any, number: int) -> int:
        device._obj.value = 10 + number
        return 0

    def cuDevicePrimaryCtxGetState(self, device: Any, flags: Any, is_active: Any) -> int:
        is_active._obj.value = device.value - 10 in self.used
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: int) -> int:
        assert device - 10 in self.used, "a context would be made on a GPU that nobody uses"
        context._obj.value = device
        self.retained += 1
        return 0

    def cuDevicePrimaryCtxRelease_v2(self, device: int) -> int:
        self.retained -= 1
        return 0

    def cuCtxPushCurrent_v2(self, context: ctypes.c_void_p) -> int:
        assert context.value is not None
        self.current.append(context.value)
        return 0

    def cuCtxPopCurrent_v2(self, context: Any) -> int:
        self.current.pop()
        return 0

    def cuMemHostRegister_v2(self, address: int, size: int, flags: int) -> int:
        assert self.current and address % mmap.PAGESIZE == 0 and address not in self.pinned
        if self.result == 0:
            self.pinned[address] = size
        return self.result

    def cuMemHostUnregister(self, address: int) -> int:
        assert self.current
        if self.pinned.pop(address, None) is None:
            return 713  # CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED
        self.unpinned.append(f"\n{address:x}-" in "\n" + Path("/proc/self/maps").read_text())
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(pinned, "_driver", lambda: driver)
    return driver


def new_memory() -> SharedMemory:
    return SharedMemory.create("pinned", SIZE)


def test_memory_is_pinned_once_and_until_it_is_unmapped(driver: Driver):
    memory = new_memory()
    for _ in range(3):
        pin(memory)
    assert memory.is_pinned and list(driver.pinned.values()) == [SIZE]
    assert not driver.current and not driver.retained
    del memory
    gc.collect()
    assert not driver.pinned and driver.unpinned == [True], "unmapped first"


def test_a_batch_keeps_it_pinned(driver: Driver):
    """Such as one that is being copied when its loader has ended."""
    memory = new_memory()
    layout = SlotLayout(loaderd.Schema({"x": loaderd.Int64()}, {"x": loaderd.Array("x")}).specs, 100)
    reader = SlotReader(memory, layout)
    batch = reader.lend(1, 100)
    assert not batch._is_pinned
    batch._pin()
    assert batch._is_pinned and memory.is_pinned and not batch.copy()._is_pinned
    batch.copy()._pin()
    array = batch["x"][10:]
    del memory, batch, reader
    gc.collect()
    assert driver.pinned
    del array
    gc.collect()
    assert not driver.pinned and driver.unpinned == [True]


def test_memory_that_others_read_is_not_pinned(driver: Driver):
    """Its pages may be exchanged: see ``make_private``."""
    memory = new_memory()
    read_only = SharedMemory(os.open(f"/proc/self/fd/{memory.fd}", os.O_RDONLY))
    pin(read_only)
    assert not read_only.is_pinned and not driver.pinned


def test_no_gpu_is_begun_to_be_used(driver: Driver):
    driver.used = ()
    memory = new_memory()
    pin(memory)
    assert not memory.is_pinned and not driver.pinned


def test_what_the_driver_refuses_is_told_once(driver: Driver, caplog: pytest.LogCaptureFixture):
    driver.result = 2  # CUDA_ERROR_OUT_OF_MEMORY
    memory = new_memory()
    with caplog.at_level(logging.WARNING):
        pin(memory)
        pin(memory)
    assert [record.message for record in caplog.records] == [
        "CUDA cannot pin the memory of batches (error 2): copies to the GPU are slower"
    ]
    assert not memory.is_pinned and not driver.current and not driver.retained


def test_after_ctrl_c_nothing_is_left_pinned(driver: Driver, monkeypatch: pytest.MonkeyPatch):
    def interrupted(address: int, size: int, flags: int) -> int:
        driver.pinned[address] = size
        raise KeyboardInterrupt

    monkeypatch.setattr(driver, "cuMemHostRegister_v2", interrupted)
    memory = new_memory()
    with pytest.raises(KeyboardInterrupt):
        pin(memory)
    assert memory.is_pinned, "so that nobody drops it while it is copied"
    assert not driver.current and not driver.retained
    del memory
    gc.collect()
    assert not driver.pinned and driver.unpinned == [True]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_leaves_the_driver_alone(driver: Driver):
    memory = new_memory()
    pin(memory)
    child = os.fork()
    if not child:
        del memory
        gc.collect()
        os._exit(len(driver.unpinned))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    del memory
    gc.collect()
    assert driver.unpinned == [True]
