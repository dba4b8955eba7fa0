"""The compiled engine gives what numpy's engines give, touches nothing else, and is never needed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from guarded import guarded
from hypothesis import example, given
from hypothesis import strategies as st

import loaderd
from loaderd.decode.batch_decoder import layout_of
from loaderd.kernels.bits import SelectBits, bits_engine
from loaderd.schema import Bits

SCALES: dict[str, list[float]] = {
    "bool": [0, 1],
    "uint8": [0, 1, 255],
    "int8": [-128, -1, 1],
    "int64": [1, -3, 2**40],
    "float16": [1.0, -1.0, 0.1, -0.0, float("nan")],
    "bfloat16": [1.0, -1.0, 0.1, float("inf")],
    "float32": [1.0, -1.0, 0.1, -0.0, float("nan")],
    "float64": [1.0, -1.0, 0.1, 1e300],
}


@pytest.fixture(scope="module", autouse=True)
def _llvmlite() -> None:
    pytest.importorskip("llvmlite")


@st.composite
def fields(draw: st.DrawFn) -> Bits:
    """Of up to 6,000 bits: some of one section, some of many and a rest, some in padded planes."""
    channels = draw(st.integers(1, 50))
    places = draw(st.integers(1, min(361, 6000 // channels)))
    dtype = draw(st.sampled_from(sorted(SCALES)))
    order = range(channels)
    turned = draw(st.integers(0, channels - 1))
    plane_bytes = draw(st.none() | st.integers(0, 3).map(lambda more: (channels + 7) // 8 + more))
    start = draw(st.one_of(st.just(0), st.integers(0, 70)))
    return Bits(
        "d",
        shape=(places, channels),
        start=start if plane_bytes is None else start // 8 * 8,
        channel_order=draw(st.sampled_from([None, order[::-1], (*order[turned:], *order[:turned])])),
        scale=draw(st.lists(st.sampled_from(SCALES[dtype]), min_size=channels, max_size=channels)),
        dtype=dtype,
        plane_bytes=plane_bytes,
    )


def decode(kernels: str, field: Bits, feature_offset: int, rows: npt.NDArray[np.uint8]) -> tuple[type, bytes]:
    """The engine, and what it writes between two guards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOADERD_KERNELS", kernels)
        engine = bits_engine(layout_of(field, feature_offset))
    engine.reserve(len(rows))
    size = len(rows) * field.num_bits * field.dtype.itemsize
    buffer = np.full(64 + size + 64, 0xA5, np.uint8)
    engine.decode(rows, buffer[64 : 64 + size].view(field.dtype).reshape(len(rows), *field.shape))
    return type(engine), buffer.tobytes()


@example(field=Bits("d", (7, 8), plane_bytes=1), feature_offset=0, num_records=2, seed=0)
@example(field=Bits("d", (8, 16), plane_bytes=3), feature_offset=0, num_records=2, seed=0)
@given(field=fields(), feature_offset=st.integers(0, 9), num_records=st.integers(1, 3), seed=st.integers(0, 999))
def test_both_kernels_write_the_same_bytes(field: Bits, feature_offset: int, num_records: int, seed: int) -> None:
    row_bytes = feature_offset + -(-field.stop // 8) + 1  # as Schema.row_dtype has it
    rows = guarded(np.random.default_rng(seed).bytes(num_records * row_bytes)).reshape(num_records, row_bytes)
    engine, found = decode("compiled", field, feature_offset, rows)
    assert found == decode("numpy", field, feature_offset, rows)[1]
    run_bits = field.num_bits if field.plane_bytes is None else field.num_channels
    assert engine is SelectBits or run_bits < 8 or row_bytes < 4 or field.num_channels > 25


def test_of_no_records_nothing_is_written() -> None:
    engine, found = decode("compiled", Bits("d", (64,)), 0, guarded(b"").reshape(0, 9))
    assert engine is SelectBits and set(found) == {0xA5}


# ------------------------------------------------------------------------------------------------ in a loader


def kernels_and_bits(program_arguments: Sequence[str], **environment: str) -> tuple[str, int]:
    """What a loader of numbered records says that it uses, and the sum of their bits, in a process of its own."""
    program = """if True:
        import ctypes, sys
        import loaderd
        PR_SET_MDWE, PR_MDWE_REFUSE_EXEC_GAIN = 65, 1
        if sys.argv[2] and ctypes.CDLL(None).prctl(PR_SET_MDWE, PR_MDWE_REFUSE_EXEC_GAIN, 0, 0, 0):
            sys.exit("this kernel cannot refuse")
        schema = loaderd.Schema(
            {"bits": loaderd.PackedBits(32)}, {"bits": loaderd.Bits("bits", shape=(32,), dtype="int8")}
        )
        with loaderd.Loader(sys.argv[1], schema, batch_size=10, epochs=1, remainder="short", workers=1) as loader:
            total = sum(int(batch["bits"].sum()) for batch in loader)
            statistics = loader.statistics()
            print(statistics.kernels, total, statistics.workers_restarted)
    """
    done = subprocess.run(
        [sys.executable, "-c", program, *program_arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    if "this kernel cannot refuse" in done.stderr:
        pytest.skip(done.stderr)
    assert done.stderr == ""
    kernels, total, restarted = done.stdout.split()
    assert restarted == "0"
    return kernels, int(total)


@pytest.fixture
def numbered(write_numbered: Callable[[Sequence[int]], list[Path]]) -> str:
    return str(write_numbered([35])[0])


BITS_OF_35_NUMBERS = sum(number.bit_count() for number in range(35))


@pytest.mark.parametrize(("allowed", "used"), [("", "compiled"), ("numpy", "numpy")])
def test_statistics_say_what_is_used(numbered: str, allowed: str, used: str) -> None:
    found = kernels_and_bits([numbered, ""], LOADERD_KERNELS=allowed)
    assert found == (used, BITS_OF_35_NUMBERS)


def test_without_fields_of_bits_nothing_unpacks_them(
    write_numbered: Callable[[Sequence[int]], list[Path]], numbered_schema: loaderd.Schema
) -> None:
    schema = loaderd.Schema(numbered_schema.features, {"id": numbered_schema.fields["id"]})
    with loaderd.Loader(write_numbered([35]), schema, batch_size=10, workers=1) as loader:
        assert loader.statistics().kernels == "numpy"


@pytest.mark.one_variant
@pytest.mark.parametrize("error", ["ImportError", "OSError", "RuntimeError"])
def test_a_broken_llvmlite_costs_nothing_but_speed(numbered: str, tmp_path: Path, error: str) -> None:
    binding = tmp_path / "broken" / "llvmlite"
    binding.mkdir(parents=True)
    (binding / "__init__.py").touch()
    (binding / "binding.py").write_text(f"raise {error}('cannot be loaded')")
    path = os.pathsep.join([str(binding.parent), os.environ.get("PYTHONPATH", "")])
    assert kernels_and_bits([numbered, ""], PYTHONPATH=path) == ("numpy", BITS_OF_35_NUMBERS)


def test_where_code_may_not_be_made_numpy_does_it(numbered: str) -> None:
    """As systemd's MemoryDenyWriteExecute has it: LLVM would abort the worker."""
    assert kernels_and_bits([numbered, "refused"]) == ("numpy", BITS_OF_35_NUMBERS)
