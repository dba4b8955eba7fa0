"""The chart of a comparison: bars of candidates, the fastest first, with the range of its rounds. Needs matplotlib.

Candidates that deliver other values (float32, int8, packed bits) have a panel of their own. There is no background,
and the text is of a grey that can be read on white and on black.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.report import FLOOR, TFDATA, Summary

_TEXT = "#7a828c"
# Colours that the colour-blind tell apart, all of them of medium brightness.
_COLOURS = {"loaderd": "#D55E00", TFDATA: "#3C8DBC", FLOOR: "#b4bac1", "": "#2E9E6B"}
_LABELS = {"loaderd": "loaderd", TFDATA: "tf.data", FLOOR: "floor: the same bytes, merely written", "": "others"}
_STYLE = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _TEXT),
    "svg.hashsalt": "loaderd",  # without it, each drawing of the same chart would be a different file
    "svg.fonttype": "none",
}
_LOG_FROM = 30.0  # above this ratio of the fastest to the slowest, the scale is logarithmic


def draw(summaries: Sequence[Summary], caption: str, paths: Sequence[Path]) -> None:
    """Write the chart into ``paths``, each in the format that its suffix says. Raises ModuleNotFoundError."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # without pyplot: no display is looked for
    from matplotlib.patches import Patch

    ordered = sorted(summaries, key=lambda summary: summary.examples_per_s.middle, reverse=True)
    panels = {kind: [one for one in ordered if one.delivered == kind] for kind in _delivered(summaries)}
    low = min(summary.examples_per_s.low for summary in ordered)
    high = max(summary.examples_per_s.high for summary in ordered)
    is_log = high > _LOG_FROM * low
    with rc_context(_STYLE):
        figure = Figure(figsize=(11, 1.3 + 0.3 * len(ordered) + 0.5 * len(panels)), layout="constrained")
        heights = [len(some) + 0.5 for some in panels.values()]
        columns = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)
        for axes, (kind, some) in zip(columns[:, 0], panels.items(), strict=True):
            _bars(axes, some)
            axes.set_title(f"{kind} bits" if kind == "packed" else kind, loc="left", fontsize=10)
        if is_log:
            axes.set_xscale("log")
        else:
            axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlim(low / 2 if is_log else 0.0, high * (6 if is_log else 1.3))
        scale = " (logarithmic)" if is_log else ""
        axes.set_xlabel(f"examples/s{scale}: median and range; × the expert's tf.data (packed: × its parsing alone)")
        kinds = [kind for kind in _COLOURS if any(_kind_of(summary) == kind for summary in ordered)]
        handles = [Patch(color=_COLOURS[kind], label=_LABELS[kind]) for kind in kinds]
        columns[0, 0].legend(handles=handles, loc="lower right", frameon=False, fontsize=9)
        figure.text(0.01, 0.0, caption, fontsize=7, va="top")
        for path in paths:
            metadata = {"Date": None} if path.suffix == ".svg" else None
            figure.savefig(path, dpi=130, transparent=True, bbox_inches="tight", metadata=metadata)


def _bars(axes: Any, summaries: Sequence[Summary]) -> None:
    for place, summary in enumerate(summaries):
        speed = summary.examples_per_s
        extent = [[speed.middle - speed.low], [speed.high - speed.middle]]
        axes.barh(place, speed.middle, xerr=extent, color=_COLOURS[_kind_of(summary)], ecolor=_TEXT, capsize=2)
        ratio = f"   {summary.to_expert.middle:.1f} ×" if summary.to_expert else ""
        note = f"   {summary.note}" if summary.note else ""
        text = f"{speed.middle:,.0f}{ratio}{note}"
        axes.annotate(text, (speed.high, place), (5, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set_yticks(range(len(summaries)), [summary.candidate for summary in summaries])
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)


def _delivered(summaries: Sequence[Summary]) -> list[str]:
    return list(dict.fromkeys(summary.delivered for summary in summaries))


def _kind_of(summary: Summary) -> str:
    return next(kind for kind in _COLOURS if summary.candidate.startswith(kind))
