"""What happened in a run, in the few words of a table's cell.

In the words of one run, what stands between two # is a figure. Runs whose words differ in figures only are told as
one, with the range of each figure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

CTRL_C_S = 5  # within which a training should have ended
LEFT_AFTER_S = (2, 10)  # when what is left is looked at

Run = dict[str, Any]


def figure(value: float, spec: str = "d") -> str:
    return f"#{value:{spec}}#"


def how_it_ended(run: Run) -> str:
    if run["epoch_ended"]:
        how = f"epoch ends {figure(run['after_s'], '.1f')} s later"
    elif run["errors"]:
        how = f"error {figure(run['after_s'], '.1f')} s later: {first_words(run['errors'][-1])}"
    elif run["outcome"] == "hangs":
        return "hangs"
    else:
        return f"its process ends with status {run['status']}"
    return how + {"hangs": ", and its process does not end", "ends": "", "error": ""}[run["outcome"]]


def without_time(how: str) -> str:
    return re.sub(r" #[\d.]+# s later", "", how)


def first_words(error: str) -> str:
    """The first line of an error without what differs from run to run; of a worker's with a traceback, its error."""
    lines = [line for line in error.split("\n") if line.strip()]
    errors = [line for line in lines[1:] if re.match(r"[\w.]+(Error|Exception|Exit)\b", line)]
    line = errors[-1] if errors and "Traceback" in error else lines[0]
    line = re.sub(r"b'[^']*'?|\{+[^}]*\}+|0x[0-9a-f]+|/\S+/", "…", line)
    line = re.sub(r"\d{2,}|process \d", "…", line).replace("|", "/")
    return f"`{line[:110]}{'…' if len(line) > 110 else ''}`"


def records(run: Run) -> str:
    if not run["epoch_ended"]:
        return ""
    lost, repeated = (figure(run[what]) if run[what] else "0" for what in ("lost", "repeated"))
    altered = f", {figure(run['altered'])} altered" if run["altered"] else ""
    return f", {lost} lost, {repeated} repeated{altered}"


def shown_order(run: Run) -> str:
    order = {True: ", same order", False: ", another order", None: ""}[run.get("same_order")]
    return how_it_ended(run) + records(run) + (order if run["epoch_ended"] else "")


def shown_worker(run: Run) -> str:
    if run["outcome"] == "no processes":
        return "no worker processes"
    return shown_order(run) + (" (all was read ahead)" if run.get("idle") else "")


def shown_noticed(run: Run) -> str:
    if run["epoch_ended"] and not run["num_errors"]:
        lost = f", {figure(run['lost'])} others lost" if run["lost"] else ""
        altered = f", {figure(run['altered'])} delivered altered" if run["altered"] else ""
        return f"not noticed: epoch ends{altered}{lost}"
    names = " and ".join(run["names"]) or "neither shard nor record nor offset"
    return without_time(how_it_ended(run)) + f" (names {names})"


def shown_skipped(run: Run) -> str:
    altered = f", {figure(run['altered'])} delivered altered" if run["altered"] else ""
    repeated = f", {figure(run['repeated'])} repeated" if run["repeated"] else ""
    lost = f"{figure(run['lost'])} others lost" if run["lost"] else "no other lost"
    ended = "" if run["outcome"] == "ends" else without_time(how_it_ended(run)) + "; "
    names = f"; names {' and '.join(run['names'])}" if run["names"] else "; names nothing"
    return f"{ended}{lost}{altered}{repeated}{names}"


def what_is_left(left: Mapping[str, Sequence[str]]) -> str:
    kinds = {"processes": "processes", "shm": "in /dev/shm", "tmp": "in TMPDIR"}
    return ", ".join(f"{figure(len(left[kind]))} {text}" for kind, text in kinds.items() if left[kind]) or "nothing"


def shown_left(run: Run) -> str:
    left = ", ".join(f"after {after_s} s {what_is_left(run['left'][str(after_s)])}" for after_s in LEFT_AFTER_S)
    return f"left {left}; {figure(run['stderr_lines'])} lines on stderr"


def shown_interrupted(run: Run) -> str:
    ended = f"ends after {figure(run['after_s'], '.1f')} s" if run["outcome"] == "ends" else f"runs on ({CTRL_C_S} s)"
    return f"{ended}; {shown_left(run)}"


def shown_resumed(run: Run) -> str:
    if not run["saved"]:
        return "cannot be saved: " + (first_words(run["errors"][-1]) if run["errors"] else "no means")
    return without_time(shown_order(run))


def shown_undisturbed(run: Run) -> str:
    left = f"; left: {what_is_left(run['left']['0'])}" if any(run["left"]["0"].values()) else ""
    return without_time(shown_order(run)) + left


def cell(runs: Sequence[Run], shown: Callable[[Run], str]) -> str:
    """What happened in each of the runs: once where it was the same, figures as ranges; else how often what."""
    by_fact: dict[str, list[list[str]]] = {}
    for run in runs:
        text = shown(run)
        by_fact.setdefault(re.sub(r"#([\d.]+)#", "#", text), []).append(re.findall(r"#([\d.]+)#", text))
    facts = []
    for fact, figures in sorted(by_fact.items(), key=lambda item: -len(item[1])):
        for values in zip(*figures, strict=True):
            low, high = min(values, key=float), max(values, key=float)
            fact = fact.replace("#", low if low == high else f"{low}–{high}", 1)
        facts.append(fact if len(by_fact) == 1 else f"{len(figures)} of {len(runs)}: {fact}")
    return "; ".join(facts) or "–"
