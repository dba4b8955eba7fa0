"""Fields that compiled functions make: of a C library, and of numba."""

from __future__ import annotations

import pickle
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderd
from loaderd.errors import SchemaError, WorkerError
from tests.helpers.numbered import Numbered

CODE = """
#include <signal.h>
#include <stdint.h>

int64_t add(const int64_t *id, const float *bits, double *out, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        for (int k = 0; k < 2; k++) out[2 * i + k] = id[i] + bits[32 * i + 31 - k];
    return 0;
}

int64_t refuse(const int64_t *id, int64_t *out, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        if (id[i] == 57) return i + 1;
        out[i] = id[i];
    }
    return 0;
}

int64_t crash(const int64_t *id, int64_t *out, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        if (id[i] == 57) raise(SIGSEGV);
        out[i] = id[i];
    }
    return 0;
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("there is no C compiler here")
    folder = tmp_path_factory.mktemp("library")
    (folder / "code.c").write_text(CODE)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "libcode.so", folder / "code.c"], check=True)
    return folder / "libcode.so"


def schema_with(function: Any, inputs: Any, shape: Any = (), dtype: str = "int64") -> loaderd.Schema:
    features = {"bits": loaderd.PackedBits(32), "id": loaderd.Int64()}
    fields = {"id": loaderd.Array("id"), "made": loaderd.Derived(function, inputs, shape, dtype)}
    return loaderd.Schema(features, fields, {"bits": loaderd.Bits("bits", (32,))})


def test_a_function_of_a_library_makes_many_records_at_once(library: Path, numbered: Numbered) -> None:
    schema = schema_with(loaderd.CFunction(library, "add"), ["id", "bits"], (2,), "float64")
    assert pickle.loads(pickle.dumps(schema)) == schema
    with loaderd.Loader(numbered.write([900, 100]), schema, batch_size=64, workers=2) as loader:
        for batch in loader:
            low = [batch["id"] + (batch["id"] & 1), batch["id"] + (batch["id"] >> 1 & 1)]
            assert np.array_equal(batch["made"], np.stack(low, axis=1))


@pytest.mark.parametrize("symbol", ["refuse", "crash"])
def test_the_record_that_it_cannot_make_is_named(library: Path, numbered: Numbered, symbol: str) -> None:
    """And the batch in front of it comes."""
    schema = schema_with(loaderd.CFunction(str(library), symbol), "id")
    with loaderd.Loader(numbered.write([100]), schema, batch_size=20, shuffle=False, workers=1) as loader:
        with pytest.raises(WorkerError, match=r"000\.tfrecord.*record 57") as raised:
            for number, batch in enumerate(loader):
                assert batch["made"].tolist() == [*range(20 * number, 20 * number + 20)]
        if symbol == "refuse":
            assert "expected 0 of its C function, but it returned" in str(raised.value)


def test_a_function_of_numba(numbered: Numbered) -> None:
    numba = pytest.importorskip("numba")

    def halves(ids: Any, out: Any, n: int) -> int:
        for place in range(n):
            out[place] = ids[place] / 2
        return 0

    compiled = numba.cfunc("int64(CPointer(int64), CPointer(float32), int64)")(halves)
    schema = schema_with(loaderd.CFunction(compiled), "id", (), "float32")
    assert schema == schema_with(loaderd.CFunction(compiled), "id", (), "float32")
    with loaderd.Loader(numbered.write([200]), schema, batch_size=64, workers=1) as loader:
        assert all((batch["made"] == batch["id"] / 2).all() for batch in loader)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda _: loaderd.CFunction("libnone.so", "add"), "'add' of 'libnone.so' cannot be loaded"),
        (lambda library: loaderd.CFunction(library, "none"), "'none' of '.*libcode.so' cannot be loaded"),
        (lambda library: loaderd.CFunction(library), "must get the path of a library and the name of a function"),
        (lambda _: loaderd.CFunction(len), "or a function of numba's cfunc, got <built-in function len>"),
        (lambda library: loaderd.Derived(loaderd.CFunction(library, "add"), "x"), "needs both, shape and dtype"),
    ],
)
def test_what_cannot_be_called_is_refused(library: Path, make: Any, said: str) -> None:
    with pytest.raises(SchemaError, match=said):
        make(library)
