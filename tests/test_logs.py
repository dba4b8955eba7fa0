"""The log of a server, as it comes out of a process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

_CODE = """
import logging, sys
from loaderd import logs
logs.configure(sys.argv[1], "daemon")
logger = logging.getLogger("loaderd")
logger.debug("too small")
logger.info("%s: %d records", "train", 7)
logger.warning("two\\nlines")
logger.warning("\\x1b[2J \\udcff ü")
try:
    1 / 0
except ZeroDivisionError:
    logger.exception("it broke")
logging.getLogger("loaderd.part").error("of a part")
logging.getLogger("others").info("not ours")
"""


@pytest.fixture(scope="module")
def logged() -> dict[str, list[str]]:
    """The lines of each format."""
    found = {}
    for log_format in ("lines", "json"):
        done = subprocess.run(
            [sys.executable, "-c", _CODE, log_format], capture_output=True, text=True, timeout=60, env={**os.environ}
        )
        assert (done.returncode, done.stdout) == (0, "")
        found[log_format] = done.stderr.splitlines()
    return found


def test_lines_begin_with_the_time_and_only_first_ones_do(logged: dict[str, list[str]]):
    head = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} ([A-Z]+) +daemon\[\d+\]: (.*)")
    found = [match.groups() for line in logged["lines"] if (match := head.match(line))]
    assert found == [
        ("INFO", "train: 7 records"),
        ("WARNING", "two"),
        ("WARNING", r"\x1b[2J \udcff ü"),
        ("ERROR", "it broke"),
        ("ERROR", "of a part"),
    ]
    others = [line for line in logged["lines"] if not head.match(line)]
    assert others[0] == "    lines" and "    ZeroDivisionError: division by zero" in others
    assert all(line.startswith("    ") for line in others)


def test_json_is_an_object_a_line(logged: dict[str, list[str]]):
    found = [json.loads(line) for line in logged["json"]]
    assert [(each["level"], each["text"]) for each in found] == [
        ("info", "train: 7 records"),
        ("warning", "two\n    lines"),
        ("warning", r"\x1b[2J \udcff ü"),
        ("error", "it broke"),
        ("error", "of a part"),
    ]
    assert "ZeroDivisionError" in found[3]["traceback"] and "traceback" not in found[0]
    assert {each["process"] for each in found} == {"daemon"}
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", each["time"]) for each in found)
