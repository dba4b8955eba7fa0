"""The words that the glossary rules out stand neither in the code nor on a page."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
GLOSSARY = ROOT / "docs" / "glossary.md"
_CODE = re.compile(r"^```.*?^```$|`[^`\n]*`|\]\([^)]*\)", re.M | re.S)


def ruled_out() -> dict[str, str]:
    """Each word of the glossary's last table, and the one to use."""
    table = GLOSSARY.read_text().partition("## Words that stand nowhere")[2]
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", table, re.M)[1:]
    return {word: instead for words, instead in rows for word in words.split(", ")}


def texts() -> dict[str, str]:
    """The code of the packages; pages without the names and addresses in them."""
    code = [path for folder in ("loaderd", "bindings", "examples") for path in (ROOT / folder).rglob("*.py")]
    pages = [path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts and path != GLOSSARY]
    found = {str(path.relative_to(ROOT)): path.read_text() for path in code}
    for path in (ROOT / "README.md", *pages):
        blank = _CODE.sub(lambda code: "\n" * code[0].count("\n"), path.read_text())
        found[str(path.relative_to(ROOT))] = blank
    return found


def test_words_that_stand_nowhere():
    words = ruled_out()
    assert len(words) >= 20 and words["trainer"] == "consumer, training"
    ways = "|".join(rf"{re.escape(word)}(?:e?s)?" for word in words).replace("\\ ", r"\s+")
    wanted = re.compile(rf"(?<![\w.])(?:{ways})(?!\w)", re.I)
    wrong = [
        f"{name}:{text.count(chr(10), 0, found.start()) + 1}: {found[0]}"
        for name, text in texts().items()
        for found in wanted.finditer(text)
    ]
    assert not wrong, "see docs/glossary.md:\n" + "\n".join(wrong)


def test_pages_write_data_set():
    """In the code, ``Dataset`` and ``dataset`` are names; on pages they stand in a code span, or are two words."""
    wrong = [
        f"{name}: {line}"
        for name, text in texts().items()
        if name.endswith(".md") and "changelog" not in name
        for line in text.splitlines()
        if re.search(r"(?<![\w.])[Dd]atasets?(?![\w.])", line)
    ]
    assert not wrong, "\n".join(wrong)
