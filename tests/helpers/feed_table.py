"""What the trainings of examples/gpu print."""

from __future__ import annotations

import re

_LINE = re.compile(
    r"^(residual|nnue) +(own|floats|packed) +([\d,]+) +no GPU +(\d+)% +([\d.]+) +([\d,]+) +([\d.]+)$", re.M
)


def check_table(printed: str, framework: str) -> None:
    """Assert that ``printed`` has a line for each network and feed of a training on the CPU, and that it learned."""
    assert re.match(rf"(?s).*^{framework} \S+ .*on the CPU, for there is no GPU here", printed, re.M), printed
    lines = _LINE.findall(printed)
    pairs = [(net, feed) for feed in ("own", "floats", "packed") for net in ("residual", "nnue")]
    assert [line[:2] for line in lines] == pairs, printed
    for _, _, rate, waiting, cores, alone, _ in lines:
        assert int(rate.replace(",", "")) > 0 and int(alone.replace(",", "")) > 0, printed
        assert int(waiting) <= 100 and float(cores) < 64, printed
    assert re.search(r"^With a batch at hand: residual [\d,]+ records/s, nnue [\d,]+ records/s\.$", printed, re.M)
