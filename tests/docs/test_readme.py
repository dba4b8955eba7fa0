"""The README is short, and leads on; its commands exist; docs/ names every option, extra and public name."""

from __future__ import annotations

import configparser
import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest

import loaderd
from loaderd.cli.main import COMMANDS
from loaderd.options import _OTHER_NAMES

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
DOCS = ROOT / "docs"


def test_it_is_a_screen_and_a_half():
    assert len(README.splitlines()) <= 130


def test_the_commands_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"`make (\w+)`", README)
    assert {*targets} >= {"demo", "bench"}
    for target in targets:
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def test_its_factors_are_those_of_the_chart():
    """The ranges over the rounds, of the candidate that the chart calls "loaderd in TensorFlow"."""
    table = (ROOT / "bench" / "results" / "2026-11-23.md").read_text()
    (row,) = (line.split("|") for line in table.splitlines() if line.startswith("| loaderd_tfdata:graph |"))
    for cell, beside in zip(row[3:5], ("the expert's tf.data", "`tf.data` compiled by XLA"), strict=True):
        low, high = (f"{float(number):.1f}" for number in re.findall(r"\((.*)–(.*)\)", cell)[0])
        assert re.search(rf"{low} to {high} times as fast\s+as {beside}", README)


def test_every_option_has_its_row():
    loaderd_tf = pytest.importorskip("loaderd_tf")
    tables = (DOCS / "options.md").read_text()
    rows = set(re.findall(r"^\| `(\w+)` \|", tables + (DOCS / "storage.md").read_text(), flags=re.MULTILINE))
    options = set(inspect.signature(loaderd.Loader.__init__).parameters) - {"self", "schema"}
    binding = set(inspect.signature(loaderd_tf.make_dataset).parameters) - {"schema", "options"}
    assert rows == options | binding | {each.name for each in fields(loaderd.Storage)}


def test_migration_says_what_an_option_of_another_library_is_told():
    rows = [row.split("|")[1:3] for row in (DOCS / "migration.md").read_text().splitlines() if row.startswith("| ")]
    named = set(re.findall(r"(\w+)=", "".join(left for left, _ in rows)))
    assert named - _OTHER_NAMES.keys() == {"default_value", "index", "iterator"}
    for name, said in _OTHER_NAMES.items():
        there = [right for left, right in rows if re.search(rf"\b{name}[=(]", left)]
        verb, option = re.findall(r"\w+=?", said)[:2]
        option = "nothing" if verb == "leave" else option
        assert any(option in right for right in there) or said == "give it" or name == "device", name


def extras() -> set[str]:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    return set(setup["options.extras_require"])


def test_every_extra_is_in_the_table():
    table = (DOCS / "start" / "install.md").read_text().partition("## Extras")[2]
    named = [re.findall(r"`([\w-]+)`", row.split("|")[1]) for row in table.splitlines() if row.startswith("| `")]
    assert {name for row in named for name in row} == extras()


def test_every_public_name_is_in_the_reference():
    text = "\n".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    named = re.findall(r"^\.\. auto(?:class|function|module):: (?:loaderd\.)?(\w+)", text, flags=re.MULTILINE)
    assert sorted(named) == sorted({*loaderd.__all__, "loaderd_jax", "loaderd_ray", "loaderd_tf", "loaderd_torch"})


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"])
def test_links_lead_somewhere(page: str):
    for target in re.findall(r"\]\(([^)#:]+)\)", (ROOT / page).read_text()):
        assert (ROOT / target).exists(), target


def test_files_that_are_named_are_there():
    pages = [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *ROOT.glob("bench/*.md")]
    for page in pages:
        for path in re.findall(r"(?<![\w/.])((?:bench|docs|examples|loaderd|tests)/[\w/.-]+\.\w+)", page.read_text()):
            assert "NAME" in path or "_build" in path or (ROOT / path).exists(), f"{page.name}: {path}"


def anchors_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as the site makes them."""
    text = page.read_text()
    included = [(page.parent / name).read_text() for name in re.findall(r"^```\{include\} (\S+)$", text, flags=re.M)]
    without_code = re.sub(r"^```.*?^```$", "", "\n".join([text, *included]), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)$", without_code, flags=re.M)
    if "sphinx_argparse_cli" in text:
        headings += [f"loaderd {command}" for command in COMMANDS]
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.relative_to(DOCS).as_posix())
def test_links_of_the_pages_lead_somewhere(page: Path):
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", page.read_text()):
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), target
        assert path.suffix != ".md" or path.is_relative_to(DOCS), f"{target} is no page of the site"
        assert not anchor or anchor in anchors_of(path), f"{target}#{anchor}"
