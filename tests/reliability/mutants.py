"""Mutants: small faults are put into the code, one at a time, and the tests must fail.

::

    python -m tests.reliability.mutants [--count 200] [--seed 0] [--processes 2] [--seconds 600]

Draws faults over ``ROOMS``: a comparison or an operator that is another one, a number that is one larger, a condition
that is the opposite, a statement that is left out, ``min`` for ``max``. Each is tried in a copy of the project, with
the tests of its room, and if these pass, with further ones. A mutant **survives** if all of them pass: then a test is
missing, or the mutant does what the code does (which a person must decide). Prints each survivor with its line, and a
line of JSON. The exit status is 1 if more than one in ten survives.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from random import Random
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
ROOMS = {
    "loaderd/plan": (["tests/plan"], ["tests/client/test_recorded_orders.py", "tests/client/test_resume.py"]),
    "loaderd/daemon/delivery": (["tests/daemon/delivery"], ["tests/daemon", "tests/client"]),
    "loaderd/shm": (["tests/shm"], ["tests/worker", "tests/daemon", "tests/client"]),
    "loaderd/worker": (["tests/worker"], ["tests/daemon", "tests/client"]),
}
"""Of each folder, the tests that are tried first, and those that are tried on what survives them."""
LIMIT_S = 240  # of one run of tests: a mutant that hangs is found
ALWAYS = ("loaderd/plan/shares.py", "def _tail_host", "self.host")
"""A mutant that once survived all tests, and gave records to the wrong host: the function returns this."""

_COMPARISONS = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Is: "is not",
    ast.IsNot: "is",
}
_OPERATORS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "//", ast.FloorDiv: "*", ast.Mod: "*", ast.LShift: ">>"}
_NAMES = {"min": "max", "max": "min", "all": "any", "any": "all", "True": "False", "False": "True"}


class Mutant(NamedTuple):
    """``text`` in place of characters ``start`` to ``stop - 1`` of the file ``path``, which begin in ``line``."""

    path: str
    line: int
    start: int
    stop: int
    text: str


class Result(NamedTuple):
    mutant: Mutant
    survives: bool
    seconds: float


def mutants_of(path: str, source: str) -> Iterator[Mutant]:
    """All mutants of a module; none in annotations, assertions, docstrings, and what errors say."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    data = source.encode()

    def at(line: int, column: int) -> int:
        return starts[line - 1] + column

    def span(node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return at(node.lineno, node.col_offset), at(node.end_lineno, node.end_col_offset)

    def mutant(start: int, stop: int, text: str, line: int) -> Mutant:
        return Mutant(path, line, start, stop, text)

    def between(left: ast.expr, right: ast.expr, new: str) -> Mutant:
        """Another operator between two operands; what stands around it (spaces, brackets) stays."""
        start, stop = span(left)[1], span(right)[0]
        gap = data[start:stop].decode()
        old = gap.strip(" ()\n")
        return mutant(start, stop, gap.replace(old, new, 1), left.lineno)

    def visit(node: ast.AST) -> Iterator[Mutant]:
        if isinstance(node, ast.Assert | ast.Raise | ast.AnnAssign | ast.JoinedStr | ast.arg):
            if isinstance(node, ast.AnnAssign) and node.value is not None:
                yield from visit(node.value)
            return
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            for left, operator, right in zip(operands, node.ops, operands[1:], strict=False):
                yield between(left, right, _COMPARISONS[type(operator)])
        elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            yield between(node.left, node.right, _OPERATORS[type(node.op)])
        elif isinstance(node, ast.BoolOp):
            for left, right in zip(node.values, node.values[1:], strict=False):
                yield between(left, right, "or" if isinstance(node.op, ast.And) else "and")
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            start, _ = span(node)
            yield mutant(start, span(node.operand)[0], "", node.lineno)
        elif isinstance(node, ast.If | ast.While | ast.IfExp):
            start, stop = span(node.test)
            yield mutant(start, stop, f"not ({data[start:stop].decode()})", node.test.lineno)
        elif isinstance(node, ast.Constant) and type(node.value) in (int, bool):
            start, stop = span(node)
            text = str(not node.value) if isinstance(node.value, bool) else str(node.value + 1)
            yield mutant(start, stop, text, node.lineno)
        elif isinstance(node, ast.Name) and node.id in _NAMES:
            yield mutant(*span(node), _NAMES[node.id], node.lineno)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield mutant(*span(node), "pass", node.lineno)
        elif isinstance(node, ast.Assign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if all(isinstance(target, ast.Attribute | ast.Subscript) for target in targets):
                yield mutant(*span(node), "pass", node.lineno)
        for child in ast.iter_child_nodes(node):
            yield from visit(child)

    def functions(node: ast.AST) -> Iterator[Mutant]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef):
                if child.name != "__repr__":
                    for statement in child.body:
                        yield from visit(statement)
            else:
                yield from functions(child)

    yield from functions(ast.parse(source))


def known_mutant() -> Mutant:
    """See ``ALWAYS``."""
    path, front, text = ALWAYS
    source = (ROOT / path).read_text()
    begin = source.index("return ", source.index(front)) + len("return ")
    begin_bytes, end_bytes = len(source[:begin].encode()), len(source[: source.index("\n", begin)].encode())
    return Mutant(path, source[:begin].count("\n") + 1, begin_bytes, end_bytes, text)


def draw(count: int, seed: int) -> list[Mutant]:
    """``count`` mutants, drawn alike from all of the rooms' lines."""
    every = [
        mutant
        for room in ROOMS
        for path in sorted((ROOT / room).rglob("*.py"))
        for mutant in mutants_of(str(path.relative_to(ROOT)), path.read_text())
    ]
    return [known_mutant(), *Random(seed).sample(every, min(count, len(every)) - 1)]


def mutated(mutant: Mutant, data: bytes) -> bytes:
    return data[: mutant.start] + mutant.text.encode() + data[mutant.stop :]


def try_out(mutant: Mutant, copy: Path, deadline_s: float) -> Result | None:
    """Whether a mutant survives in a ``copy`` of the project; None: there was no time to see."""
    path, began_s = copy / mutant.path, time.monotonic()
    healthy = path.read_bytes()
    first, further = next(tests for room, tests in ROOMS.items() if mutant.path.startswith(room + "/"))
    path.write_bytes(mutated(mutant, healthy))
    try:
        ast.parse(path.read_text())
        passes = all(_passes(copy, folder, deadline_s) for folder in [*first, *further] if (copy / folder).exists())
    except SyntaxError:
        passes = False
    except TimeoutError:
        return None
    finally:
        path.write_bytes(healthy)
    return Result(mutant, passes, time.monotonic() - began_s)


def _passes(copy: Path, tests: str, deadline_s: float) -> bool:
    """Whether ``tests`` pass in ``copy``. What hangs does not. Raises TimeoutError when there is no time left."""
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    search = os.pathsep.join([str(copy), str(copy / "bindings"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": search, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", tests]
    command += ["--hypothesis-profile=unshrunk"]  # it is enough that an example fails
    with subprocess.Popen(
        command,
        cwd=copy,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        try:
            status = process.wait(min(LIMIT_S, left_s))
        except subprocess.TimeoutExpired:
            if left_s < LIMIT_S:
                raise TimeoutError from None
            status = -1
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return status in (0, 5)  # 5: there are no tests in the folder


def run(mutants: list[Mutant], processes: int, seconds: float) -> list[Result]:
    """The results of those that there was time for."""
    deadline_s = time.monotonic() + seconds
    copies: Queue[Path] = Queue()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(processes):
            copy = Path(folder, str(number))
            for name in ("loaderd", "bindings", "tests", "bench", "examples", "docs"):
                shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            for path in ROOT.iterdir():
                if path.is_file():
                    shutil.copy(path, copy)
            copies.put(copy)

        def one(mutant: Mutant) -> Result | None:
            copy = copies.get()
            try:
                return try_out(mutant, copy, deadline_s)
            finally:
                copies.put(copy)

        with ThreadPoolExecutor(processes) as pool:
            return [result for result in pool.map(one, mutants) if result is not None]


def shown(mutant: Mutant) -> str:
    """The mutant as a person reads it: its place, and its line before and after."""
    data = (ROOT / mutant.path).read_bytes()
    begin = data.rfind(b"\n", 0, mutant.start) + 1
    end = data.find(b"\n", mutant.stop)
    before = data[begin:end].decode().strip()
    after = (data[begin : mutant.start] + mutant.text.encode() + data[mutant.stop : end]).decode().strip()
    return f"{mutant.path}:{mutant.line}\n  - {before}\n  + {after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop then; what was tried counts")
    arguments = parser.parse_args()
    results = run(draw(arguments.count, arguments.seed), arguments.processes, arguments.seconds)
    survivors = [result for result in results if result.survives]
    for result in survivors:
        print(shown(result.mutant))
    seconds = sum(result.seconds for result in results)
    figures = {"mutants": len(results), "survivors": len(survivors), "core_seconds": round(seconds)}
    print(json.dumps({**figures, "known_dies": not results[0].survives if results else None}))
    return int(len(survivors) * 10 > len(results))


if __name__ == "__main__":
    sys.exit(main())
