"""What tells a user's function from another one, in this program and in the next."""

from __future__ import annotations

import functools
import itertools
import operator
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loaderd.schema.functions import digest_of

LIMIT, TABLE, ALLOWED = 3, np.arange(4.0), {"a": 1}


def above(numbers: Any) -> Any:
    return numbers > LIMIT


def calling(numbers: Any) -> Any:
    return above(numbers) | np.isin(numbers, [1, 2]) | (TABLE[0] > len(ALLOWED))


def closed_over(limit: Any) -> Callable[..., Any]:
    return lambda numbers: [number > limit for number in numbers]


def test_what_a_function_sees_is_part_of_its_key(monkeypatch: pytest.MonkeyPatch):
    keys = [digest_of(calling)]
    for name, value in {"LIMIT": 4, "TABLE": np.arange(5.0), "ALLOWED": {"a": 2}}.items():
        monkeypatch.setattr(sys.modules[__name__], name, value)
        keys.append(digest_of(calling))
    keys += [digest_of(closed_over(limit)) for limit in (3, 3.0, np.float32(3), (3,), None, frozenset({3}))]
    keys += [digest_of(functools.partial(above, *given)) for given in ((), (1,))]
    keys += [digest_of(np.isfinite), digest_of(lambda numbers, limit=3: numbers > limit)]
    keys += [digest_of(lambda numbers: numbers in {1, 2}), digest_of(lambda numbers: numbers in {1, 3})]
    assert None not in keys and len(set(keys)) == len(keys)
    assert digest_of(closed_over(3)) == digest_of(closed_over(3))


def combined(first: Any, second: Any, third: Any) -> Callable[..., Any]:
    return lambda numbers: first(numbers) | second(numbers) & third(numbers)


def importing(numbers: Any) -> Any:
    import string

    return numbers > len(string.digits)


def marked(limit: int) -> Callable[..., Any]:
    def function(numbers: Any) -> Any:
        return numbers > LIMIT

    function.limit = limit  # type: ignore[attr-defined]
    return function


def test_a_function_that_is_seen_again_is_told_from_others():
    low, high = (lambda numbers: numbers > 1), (lambda numbers: numbers > 9)
    keys = [digest_of(combined(*three)) for three in itertools.product((low, high), repeat=3)]
    assert None not in keys and len(set(keys)) == 8
    keys = [digest_of(limited) for limited in (above, marked(3), marked(4))]
    assert None not in keys and len(set(keys)) == 3


def test_what_is_not_certain_has_no_key():
    class Limit:
        pass

    module_of_the_users = sys.modules[__name__]
    uncertain = (
        Limit(),
        {Limit},
        module_of_the_users,
        np.vectorize(above),
        np.frompyfunc(above, 1, 1),
        os,
        os.getenv,
    )
    uncertain = (
        *uncertain,
        os.getenv,
        open,
        eval,
        Path,
        operator.itemgetter(1),
        "".join,
        np.random.rand,
        LIMIT.bit_length,
    )
    for value in uncertain:
        assert digest_of(closed_over(value)) is None, value
    assert digest_of(importing) is None
    assert digest_of(np.vectorize(above)) is None


PROGRAM = "import sys; sys.path[:0] = {!r}; from loaderd.schema.functions import digest_of; import filters; "


def test_a_key_outlives_the_program_but_not_a_change_of_an_installed_package(tmp_path: Path):
    site = tmp_path / "site-packages"
    site.mkdir()
    (tmp_path / "filters.py").write_text("from own import make, same\ndef keep(x): return make(3)(x) & same(x)\n")

    def key(version: str | None, limit: int) -> list[str]:
        (site / "own.py").write_text(
            f"__version__ = {version!r}\ndef same(x): return x\ndef make(n): return lambda x: x > n + {limit}\n"
        )
        program = PROGRAM.format([str(tmp_path), str(site)]) + "print(digest_of({}))"
        keys = [program.format(function) for function in ("filters.keep", "filters.make(4)", "filters.make(5)")]
        run = functools.partial(subprocess.run, check=True, capture_output=True, text=True)
        return [run([sys.executable, "-B", "-c", text]).stdout for text in keys]

    one = key("1.0", 1)
    assert one == key("1.0", 1) and len({*one}) == 3 and "None\n" not in one
    assert one[0] not in key("1.1", 1) and not {*one[1:]} & {*key("1.0", 2)}
    assert key(None, 1)[0] != key(None, 2)[0], "the code of a package without a version counts"
