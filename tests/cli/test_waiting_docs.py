"""What docs/waiting.md says: its commands can be given, and it names every verdict."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import get_args

from loaderd.cli.main import parser
from loaderd.diagnosis import Verdict

DOCS = (Path(__file__).parents[2] / "docs" / "waiting.md").read_text()


def test_the_commands_can_be_given():
    (block,) = re.findall(r"^```sh\n(.*?)^```$", DOCS, flags=re.MULTILINE | re.DOTALL)
    commands = [shlex.split(line, comments=True) for line in block.splitlines()]
    assert [command[:2] for command in commands].count(["loaderd", "doctor"]) == 3
    for command in commands:
        assert command[0] == "loaderd" and parser().parse_args(command[1:]).run
    for option in re.findall(r"--[a-z][a-z-]+", DOCS):
        assert option in ("--json", "--max-waiting", "--schema", "--step-ms")


def test_every_verdict_is_explained():
    assert set(re.findall(r"^\| `\"(.*?)\"` \|", DOCS, flags=re.MULTILINE)) == set(get_args(Verdict))
