"""JAX with two CPU devices, so that copies from one device to another can be tested without an accelerator.

This can be said only before JAX is imported: here it is said while tests are collected.
"""

from __future__ import annotations

import os
import socket
from importlib.util import find_spec

import pytest

if find_spec("jax") is not None:
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # of a GPU, only the memory that is needed


@pytest.fixture
def free_port() -> int:
    """A port of this machine that nothing listened to just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
