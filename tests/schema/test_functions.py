"""What tells a user's function from another one, in this program and in the next."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loaderd.schema.functions import function_key

LIMIT, TABLE, ALLOWED = 3, np.arange(4.0), {"a": 1}


def above(numbers: Any) -> Any:
    return numbers > LIMIT


def calling(numbers: Any) -> Any:
    return above(numbers) | np.isin(numbers, [1, 2]) | (TABLE[0] > len(ALLOWED))


def closed_over(limit: Any) -> Callable[..., Any]:
    return lambda numbers: [number > limit for number in numbers]


def test_what_a_function_sees_is_part_of_its_key(monkeypatch: pytest.MonkeyPatch):
    keys = [function_key(calling)]
    for name, value in {"LIMIT": 4, "TABLE": np.arange(5.0), "ALLOWED": {"a": 2}}.items():
        monkeypatch.setattr(sys.modules[__name__], name, value)
        keys.append(function_key(calling))
    keys += [function_key(closed_over(limit)) for limit in (3, 3.0, np.float32(3), (3,), None, frozenset({3}))]
    keys += [function_key(functools.partial(above, *given)) for given in ((), (1,))]
    keys += [function_key(np.isfinite), function_key(lambda numbers, limit=3: numbers > limit)]
    keys += [function_key(lambda numbers: numbers in {1, 2}), function_key(lambda numbers: numbers in {1, 3})]
    assert None not in keys and len(set(keys)) == len(keys)
    assert function_key(closed_over(3)) == function_key(closed_over(3))


def test_what_an_object_of_a_class_of_the_users_does_cannot_be_told():
    class Limit:
        pass

    assert function_key(closed_over(Limit())) is None
    assert function_key(closed_over({Limit})) is None


PROGRAM = "import sys; sys.path.insert(0, {!r}); import filters; from loaderd.schema.functions import function_key; "


def test_a_key_outlives_the_program_but_not_a_change_of_a_module_that_the_function_names(tmp_path: Path):
    (tmp_path / "filters.py").write_text("import other\ndef keep(x): return x < other.LIMIT\n")

    def key(limit: int) -> str:
        (tmp_path / "other.py").write_text(f"LIMIT = {limit}\n")
        program = PROGRAM.format(str(tmp_path)) + "print(function_key(filters.keep))"
        return subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout

    assert key(1) == key(1) != key(2)
