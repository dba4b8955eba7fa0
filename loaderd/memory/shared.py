"""Anonymous memory that processes share by file descriptor.

A memfd has no name in any file system (nothing in /dev/shm, so a container's limit on that does not apply) and is
gone with the last process that has it open or mapped, however that process ends. Huge pages were tried: filling slots
took as long with them as without.
"""

from __future__ import annotations

import mmap
import os

import numpy as np
import numpy.typing as npt


class SharedMemory:
    """A mapping of a memfd. ``bytes``: uint8, (size,), writable. It is unmapped when its last view is gone."""

    def __init__(self, fd: int) -> None:
        """Map the memfd ``fd``, which this object owns from now on."""
        self.fd = fd
        size = os.fstat(fd).st_size
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(mmap.mmap(fd, size), dtype=np.uint8)

    @classmethod
    def create(cls, name: str, size: int) -> SharedMemory:
        """New, zeroed memory of ``size`` bytes; ``name`` shows in /proc/PID/maps. Raises OSError."""
        fd = os.memfd_create(f"loaderd-{name}", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, max(size, mmap.PAGESIZE))
            return cls(fd)
        except BaseException:
            os.close(fd)
            raise

    def close_fd(self) -> None:
        """Give the file descriptor back; the mapping stays while anything views it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
