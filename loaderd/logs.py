"""The log of a server: lines for people, or a JSON object a line, on standard error.

A server's supervisor and its other processes write to the same standard error. So each record is a single write,
and names the process that it comes from.
"""

from __future__ import annotations

import json
import logging
import os
from datetime import datetime, timezone
from typing import Any, Literal

from loaderd.redaction import make_readable, printable, redacted

LogFormat = Literal["lines", "json"]
FORMATS: tuple[LogFormat, ...] = ("lines", "json")


def configure(log_format: LogFormat, process: str) -> None:
    """Have the logger "loaderd" write to standard error, from level INFO on; ``process`` is the name of this one."""
    handler = logging.StreamHandler()
    handler.addFilter(make_readable)
    handler.setFormatter(_Lines(process) if log_format == "lines" else _Json(process))
    logger = logging.getLogger("loaderd")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False


class _Lines(logging.Formatter):
    """``2026-11-21 22:10:03.123 INFO    daemon[4711]: text``; further lines of a text are indented."""

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s.%(msecs)03d %(levelname)-7s {process}[{os.getpid()}]: %(message)s")
        self.datefmt = "%Y-%m-%d %H:%M:%S"

    def formatException(self, ei: Any) -> str:
        return "    " + printable(redacted(super().formatException(ei))).replace("\n", "\n    ")


class _Json(logging.Formatter):
    """The keys are time (UTC), level, process, pid, text and, of an exception, traceback."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, timezone.utc)
        found = {
            "time": time.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "pid": os.getpid(),
            "text": record.getMessage(),
        }
        if record.exc_info:
            found["traceback"] = redacted(self.formatException(record.exc_info))
        return json.dumps(found)
