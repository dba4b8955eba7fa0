"""``make demo``, with few records: what it says is measured."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

Start = Any  # of conftest.py: start("demo/demo.py", *arguments)


def test_the_demo_says_what_it_measured(start: Start, tmp_path: Path) -> None:
    arguments = ("--out", tmp_path / "out", "--records", 16_000, "--seconds", 0.3, "--svg", tmp_path / "demo.svg")
    with start("demo/demo.py", *arguments) as running:
        printed = running.end()
    words = " ".join(printed.split())  # without the ends of lines
    rates = re.findall(r"^ +(loaderd|tf\.data, [a-z ]*[a-z]) .* ([\d,]+) records/s", printed, re.M)
    assert [name for name, _ in rates] == ["loaderd", "tf.data, by an expert", "tf.data, at first"]
    assert "the same values from all three: 2,000 records" in words
    assert re.search(r"process [1-9]\d+ got SIGKILL behind batch \d+;", words)
    assert re.search(r"from its checkpoint, step [1-9]\d of 64", words)
    digests = re.findall(r"(?:undisturbed|killed): +([0-9a-f]{16})", printed)
    assert len(digests) == 4 and digests[0] == digests[1] and digests[2] == digests[3] != digests[0]
    assert re.search(r"CorruptRecordError: 1 damaged .* record 1234 at byte [\d]+: expected", words)
    assert "1,999 records come, all but that one" in words
    assert len(re.findall(r"^ +\S.* s +[\d]+% of it waiting", printed, re.M)) == 3
    assert "loaderd" in (tmp_path / "demo.svg").read_text()
