"""The bells of a page, in tests."""

from __future__ import annotations

import os


def was_rung(bell: int) -> bool:
    """Whether a bell was rung since this was asked last."""
    try:
        return os.eventfd_read(bell) > 0
    except BlockingIOError:
        return False
