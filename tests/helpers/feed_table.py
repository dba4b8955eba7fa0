"""What the trainings of examples/gpu print."""

from __future__ import annotations

import re

_LINE = re.compile(
    r"^(residual|nnue) +(framework|floats|packed) +([\d,]+) +no GPU +([\d,]+) +(-?\d+)% +([\d.]+) +([\d,]+)"
    r" +([\d.]+)$",
    re.M,
)


def check_table(printed: str, framework: str) -> None:
    """Assert that ``printed`` has a line for each network and feed of a training on the CPU, of possible figures."""
    assert re.match(rf"(?s).*^{framework} \S+ .*on the CPU, for there is no GPU here", printed, re.M), printed
    lines = _LINE.findall(printed)
    pairs = [(net, feed) for feed in ("framework", "floats", "packed") for net in ("residual", "nnue")]
    assert [line[:2] for line in lines] == pairs, printed
    for _, _, rate, at_hand, waiting, cores, alone, loss in lines:
        assert all(int(each.replace(",", "")) > 0 for each in (rate, at_hand, alone)), printed
        assert int(waiting) <= 100 and float(cores) < 64, printed
        assert float(loss) <= 4, f"the network's values and the scores are from -1 to 1:\n{printed}"
