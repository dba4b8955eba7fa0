"""The chart that is shown draws the runs beside it: bars as long as their values, on a scale that begins at 0."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from harness.chart import draw, shown, summaries_of

LOG = Path(__file__).parents[2] / "bench" / "results" / "2026-11-23.jsonl"
SVG = "{http://www.w3.org/2000/svg}"


def bars_of(path: Path) -> list[tuple[str, float]]:
    """Value and length of each bar."""
    drawn = ElementTree.parse(path).getroot()
    values = [text.text or "" for text in drawn.iter(f"{SVG}text")][2::2]
    lengths = [float(bar.attrib["width"]) for bar in drawn.iter(f"{SVG}rect")][1:]
    return list(zip(values, lengths, strict=True))


def test_the_chart_of_the_readme_is_that_of_its_runs(tmp_path: Path) -> None:
    draw(summaries_of(LOG), tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text() == LOG.with_suffix(".svg").read_text()
    table = LOG.with_suffix(".md").read_text()
    bars = bars_of(LOG.with_suffix(".svg"))
    assert len(bars) == 6
    for value, length in bars:
        records = float(value.replace(",", ""))
        assert length / bars[-1][1] == pytest.approx(records / float(bars[-1][0].replace(",", "")), abs=2e-3)
        assert any(value == shown(float(row.split()[3].replace(",", ""))) for row in table.splitlines()[10:]), value


def test_other_candidates_have_a_bar_each(tmp_path: Path) -> None:
    some = [one for one in summaries_of(LOG) if one.candidate in ("loaderd_python", "grain_loader", "tfdata_expert")]
    draw(some, tmp_path / "some.svg")
    assert [value for value, _ in bars_of(tmp_path / "some.svg")] == ["50,000", "298,000", "2,608,000"]
    assert ">grain_loader</text>" in (tmp_path / "some.svg").read_text()
