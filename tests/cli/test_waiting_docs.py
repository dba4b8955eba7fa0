"""What docs/waiting.md says: its commands can be given, it names every verdict, and its pictures are there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import get_args

from loaderd.cli.main import parser
from loaderd.observe.remedies import Verdict

FOLDER = Path(__file__).parents[2] / "docs"
DOCS = (FOLDER / "waiting.md").read_text()


def test_the_commands_can_be_given():
    (block,) = re.findall(r"^```sh\n(.*?)^```$", DOCS, flags=re.MULTILINE | re.DOTALL)
    commands = [words for line in block.splitlines() if (words := shlex.split(line, comments=True))]
    assert [command[:2] for command in commands].count(["loaderd", "doctor"]) == 3
    for command in commands:
        assert command[0] == "loaderd" and parser().parse_args(command[1:]).run


def test_every_verdict_is_explained():
    cells = re.findall(r"^\| (`\".*?\"`) \|", DOCS, flags=re.MULTILINE)
    assert {name for cell in cells for name in re.findall(r"`\"(.*?)\"`", cell)} == set(get_args(Verdict))


def test_the_pictures_are_there():
    pictures = re.findall(r"!\[.*?\]\((.*?)\)", DOCS)
    assert len(pictures) == 2
    for picture in pictures:
        assert (FOLDER / picture).stat().st_size < 100_000
