"""Shared memory out of which NVIDIA's GPUs copy by themselves.

A copy to a GPU goes through memory of the driver's, and the thread that asks for it writes there: 7 GB/s on a machine
with an H200. Out of memory that is pinned, which means that its pages stay where they are and the driver knows where
that is, the GPU copies at 55 GB/s, while the host does other things. All frameworks of a process profit alike: each
asks the driver, and the driver knows.

**A copy is under way after the call that began it.** Whoever drops the arrays before it is over gives their slot
back, and a worker may write there while the GPU still reads. TensorFlow keeps them until then. PyTorch does not:
``loaderd_torch`` does, for copies that it makes itself, and its tensors on the host are copies of what lies in pinned
memory.

Pages stay pinned as long as the ``SharedMemory`` lives, which every batch in it keeps. The driver is told in front of
the unmapping: else it would go on copying out of pages that are no longer at this address. No context is made on a
GPU that the process does not use: it would take half a GiB of that GPU's memory.

Source: NVIDIA, CUDA Driver API, "Memory Management", ``cuMemHostRegister``.
"""

from __future__ import annotations

import ctypes
import logging
import os
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

from loaderd.shm.anonymous import SharedMemory

_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE: for all contexts, so for all GPUs
_NO_CONTEXT = -1  # as a result: this process uses no GPU

_logger = logging.getLogger("loaderd")


def pin(memory: SharedMemory) -> None:
    """Pin ``memory``, unless that was tried before, and say so in its ``is_pinned``. Takes 0.25 ms a MiB.

    What is not writable stays as it is: other processes read it, too, and its pages may be exchanged. Where the
    driver refuses, a warning is logged, and copies are slower.
    """
    if memory.is_pinned is not None:
        return
    address, size = memory.bytes.__array_interface__["data"][0], len(memory.bytes)
    result = _NO_CONTEXT
    memory.is_pinned = True  # first, so that nothing is left undone if Ctrl-C comes
    if memory.writable:
        # Of the object, not of its array: numpy 2.5 tells of an array's end when the memory is unmapped already.
        weakref.finalize(memory, _unpin, address, os.getpid()).atexit = False
        result = _in_a_context(lambda driver: driver.cuMemHostRegister_v2(address, size, _PORTABLE))
    if result > 0:
        _logger.warning("CUDA cannot pin the memory of batches (error %d): copies to the GPU are slower", result)
    memory.is_pinned = result == 0


def _unpin(address: int, pid: int) -> None:
    if os.getpid() == pid:  # a forked child has the mapping, but no GPU
        _in_a_context(lambda driver: driver.cuMemHostUnregister(address))


def _in_a_context(call: Callable[[Any], int]) -> int:
    """What ``call`` of the driver returns, in the context of a GPU that this process uses; or _NO_CONTEXT."""
    driver = _driver()
    device = None if driver is None else _used_device(driver)
    if driver is None or device is None:
        return _NO_CONTEXT
    context = ctypes.c_void_p()
    if result := driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device):
        return int(result)
    try:
        if result := driver.cuCtxPushCurrent_v2(context):
            return int(result)
        try:
            return call(driver)
        finally:
            driver.cuCtxPopCurrent_v2(ctypes.byref(context))
    finally:
        driver.cuDevicePrimaryCtxRelease_v2(device)


def _used_device(driver: Any) -> int | None:
    """A GPU on which something of this process has the primary context, which is the one that all frameworks use."""
    count, device, flags, is_active = (ctypes.c_int() for _ in range(4))
    driver.cuDeviceGetCount(ctypes.byref(count))
    for number in range(count.value):
        driver.cuDeviceGet(ctypes.byref(device), number)
        driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(is_active))
        if is_active.value:
            return device.value
    return None


@cache
def _driver() -> Any:
    """The driver's library, or None where there is none, or no GPU."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    driver.cuMemHostRegister_v2.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
    driver.cuMemHostUnregister.argtypes = [ctypes.c_void_p]
    return driver if driver.cuInit(0) == 0 else None
