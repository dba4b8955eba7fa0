"""Anonymous memory that processes share by file descriptor.

A memfd has no name in any file system (nothing in /dev/shm, so a container's limit on that does not apply) and is
gone with the last process that has it open or mapped, however that process ends. The kernel allocates a memory page
of it at the first write, which cannot fail: if there is no memory left, the kernel kills a process. Huge pages were
tried: filling slots took as long with them as without.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from collections import deque

import numpy as np
import numpy.typing as npt

from loaderd.errors import DaemonError
from loaderd.machine import in_mib, remedy

_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2  # linux/mman.h
_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = _libc.mremap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]


class SharedMemory:
    """A mapping of a memfd. ``bytes``: uint8, (size,). It is unmapped when its last view is gone.

    ``writable``: whether the descriptor was opened for writing, too. It is the same for every process that has it.
    """

    is_pinned: bool | None = None
    """Whether GPUs copy out of it by themselves; None: nobody has asked for that. See ``pinned.py``."""

    def __init__(self, fd: int) -> None:
        """Map the memfd ``fd``, which this object owns from now on; raises DaemonError."""
        self.fd = fd
        self.writable = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
        size = os.fstat(fd).st_size
        try:
            mapped = mmap.mmap(fd, size, access=mmap.ACCESS_WRITE if self.writable else mmap.ACCESS_READ)
        except OSError as error:
            self.close_fd()
            raise _error(size, error) from None
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(mapped, dtype=np.uint8)

    @classmethod
    def create(cls, name: str, size: int) -> SharedMemory:
        """New, zeroed memory of ``size`` bytes; ``name`` shows in /proc/PID/maps. Raises DaemonError."""
        fd = -1
        try:
            fd = os.memfd_create(f"loaderd-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, max(size, 1))  # an empty file cannot be mapped
            # Nobody may make it shorter: a process that reads behind the end dies of SIGBUS.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            raise _error(size, error) from None
        return cls(fd)

    def close_fd(self) -> None:
        """Give the file descriptor back; the mapping stays while anything views it."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    __del__ = close_fd  # for an object that an exception has left behind


def mapped(*fds: int) -> list[SharedMemory]:
    """Map the memories of these descriptors, and close all of them, even where one cannot be mapped: DaemonError."""
    rest = deque(fds)
    stream_memory = []
    try:
        while rest:
            stream_memory.append(SharedMemory(rest.popleft()))
    finally:
        for fd in rest:
            os.close(fd)
        for memory in stream_memory:
            memory.close_fd()
    return stream_memory


def make_private(address: int, size: int) -> None:
    """Put a private copy in the place of whole pages of a mapping. Raises DaemonError.

    The copy has their contents and their address, and goes with the mapping. Another thread that reads them sees
    nothing of it: the kernel exchanges the pages in one step.
    """
    copy = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if copy != _FAILED:
        ctypes.memmove(copy, address, size)
        if _libc.mremap(copy, size, size, _MREMAP_MAYMOVE | _MREMAP_FIXED, address) != _FAILED:
            return
    number = ctypes.get_errno()
    if copy != _FAILED:
        _libc.munmap(copy, size)
    raise _error(size, OSError(number, os.strerror(number)), "memory")


def _error(size: int, error: OSError, what: str = "shared memory") -> DaemonError:
    is_locked = error.errno == errno.EAGAIN  # mmap(2), of a process that has called mlockall
    hint = "This process locks its memory: raise `ulimit -l`." if is_locked else remedy(error)
    return DaemonError(f"cannot allocate {in_mib(size)} of {what}: {error.strerror}", hint=hint)
