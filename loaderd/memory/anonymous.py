"""Anonymous memory that processes share by file descriptor.

A memfd has no name in any file system (nothing in /dev/shm, so a container's limit on that does not apply) and is
gone with the last process that has it open or mapped, however that process ends. Its pages are taken when they are
first written, and that cannot fail: if there are none left, the kernel kills somebody. Huge pages were tried: filling
slots took as long with them as without.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections import deque

import numpy as np
import numpy.typing as npt

from loaderd.errors import DaemonError
from loaderd.machine import in_mib, remedy


class SharedMemory:
    """A mapping of a memfd. ``bytes``: uint8, (size,). It is unmapped when its last view is gone.

    ``writable``: whether the descriptor was opened for writing, too. It is the same for every process that has it.
    """

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
            os.ftruncate(fd, max(size, mmap.PAGESIZE))
            # Nobody may make it shorter: a process that reads behind the end dies of SIGBUS.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            raise _error(size, error) from None
        return cls(fd)

    @classmethod
    def holding(cls, name: str, data: bytes) -> SharedMemory:
        """As :meth:`create`, with ``data`` at its beginning."""
        memory = cls.create(name, len(data))
        memory.bytes[: len(data)] = np.frombuffer(data, np.uint8)
        return memory

    def close_fd(self) -> None:
        """Give the file descriptor back; the mapping stays while anything views it."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    __del__ = close_fd  # of what was made when an exception came


def mapped(*fds: int) -> list[SharedMemory]:
    """What these are descriptors of; all of them are closed then, also where one cannot be mapped: DaemonError."""
    rest = deque(fds)
    memories = []
    try:
        while rest:
            memories.append(SharedMemory(rest.popleft()))
    finally:
        for fd in rest:
            os.close(fd)
        for memory in memories:
            memory.close_fd()
    return memories


def _error(size: int, error: OSError) -> DaemonError:
    return DaemonError(f"cannot have {in_mib(size)} of shared memory: {error.strerror}", hint=remedy(error))
