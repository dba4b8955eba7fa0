"""Durations in words, for screens."""

from __future__ import annotations


def span(seconds: float | None) -> str:
    """A duration in words, such as "3 s", "5 min", "2.5 h"; "" for None."""
    if seconds is None:
        return ""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
