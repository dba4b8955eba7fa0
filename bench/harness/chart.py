"""The chart of a comparison: a bar for each candidate, on one linear scale, as an SVG that a phone can show.

::

    PYTHONPATH=bench python -m harness.chart bench/results/2026-11-23.jsonl    # draws it again, beside its runs

Where all candidates of ``_WORDS`` were timed, these are the bars. Otherwise every candidate is one. The picture has a
background of its own, in the reader's light or dark mode.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from harness.report import Summary, summarise

_WORDS = {
    "tfdata_seed": "tf.data, as first written",
    "torch_dataloader": "PyTorch DataLoader",
    "tfdata_expert": "tf.data, by an expert",
    "tfdata_xla:noshuffle,graph": "tf.data with XLA, unshuffled",
    "loaderd_tfdata:graph": "loaderd in TensorFlow",
    "loaderd_torch_batches": "loaderd in PyTorch",
}
# In units of the picture: at the 358 pixels that a phone gives to its 700, text of 21 is 11 pixels high.
_WIDTH, _TOP, _ROW, _MARGIN, _BARS_AT, _TEXT, _DIGIT = 700, 32, 37, 12, 312, 21, 12.5
_STYLE = """
.paper { fill: #ffffff } text { fill: #1f2328 } .bar { fill: #8c959f }
.ours { fill: #bc4c00 } .inside { fill: #ffffff }
@media (prefers-color-scheme: dark) { .paper { fill: #0d1117 } text { fill: #e6edf3 } .bar { fill: #6e7681 } }
"""


def draw(summaries: Sequence[Summary], path: Path) -> None:
    """Write the chart of ``summaries`` to ``path``."""
    named = [one for one in summaries if one.candidate in _WORDS]
    bars = sorted(named if len(named) == len(_WORDS) else summaries, key=lambda one: one.examples_per_s.middle)
    height = _TOP + _ROW * len(bars) + 6
    longest = _WIDTH - _BARS_AT - _MARGIN
    scale = longest / bars[-1].examples_per_s.middle
    values = [(_WORDS.get(one.candidate, one.candidate), shown(one.examples_per_s.middle)) for one in bars]
    told = "; ".join(f"{label}: {value}" for label, value in values)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}"'
        f' font-family="system-ui, Segoe UI, Helvetica, Arial, sans-serif" font-size="{_TEXT}" role="img">',
        f"<title>Records a second. {escape(told)}</title>",
        f"<style>{_STYLE}</style>",
        f'<rect class="paper" width="{_WIDTH}" height="{height}" rx="8"/>',
        f'<text x="{_BARS_AT}" y="24" font-size="18">records a second</text>',
    ]
    for row, (one, (label, value)) in enumerate(zip(bars, values, strict=True)):
        top, length = _TOP + _ROW * row, one.examples_per_s.middle * scale
        is_ours = one.candidate.startswith("loaderd")
        weight = ' font-weight="600"' if is_ours else ""
        fits_behind = length + len(value) * _DIGIT + 8 <= longest
        at = _BARS_AT + length + (8 if fits_behind else -8)
        inside = "" if fits_behind else ' class="inside" text-anchor="end"'
        lines += [
            f'<text x="{_MARGIN}" y="{top + 24}"{weight}>{escape(label)}</text>',
            f'<rect class="{"ours" if is_ours else "bar"}" x="{_BARS_AT}" y="{top + 3}" width="{length:.1f}"'
            f' height="{_ROW - 8}"/>',
            f'<text x="{at:.1f}" y="{top + 24}"{inside}{weight}>{value}</text>',
        ]
    path.write_text("\n".join([*lines, "</svg>", ""]))


def shown(records_per_s: float) -> str:
    """In thousands, from ten thousand on."""
    return f"{round(records_per_s, -3 if records_per_s >= 10_000 else None):,.0f}"


def summaries_of(log: Path) -> list[Summary]:
    """Of the runs in a comparison's file of JSON lines. Of a run that was taken again, the last one counts."""
    runs = [json.loads(line) for line in log.read_text().splitlines()]
    counted = {(run["round"], run["candidate"]): run for run in runs if not run.get("cold")}
    return summarise(list(counted.values()), [run for run in runs if run.get("cold")])


if __name__ == "__main__":
    draw(summaries_of(Path(sys.argv[1])), Path(sys.argv[1]).with_suffix(".svg"))
