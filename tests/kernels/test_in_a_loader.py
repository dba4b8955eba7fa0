"""A loader uses compiled code where it can be made, says so, and does without it where it cannot."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest


@pytest.fixture(scope="module", autouse=True)
def _llvmlite() -> None:
    pytest.importorskip("llvmlite")


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
def shard(write_numbered: Callable[[Sequence[int]], list[Path]]) -> str:
    return str(write_numbered([35])[0])


BITS_OF_35_NUMBERS = sum(number.bit_count() for number in range(35))


@pytest.mark.parametrize(("allowed", "used"), [("", "compiled"), ("numpy", "numpy")])
def test_statistics_say_what_is_used(shard: str, allowed: str, used: str) -> None:
    found = kernels_and_bits([shard, ""], LOADERD_KERNELS=allowed)
    assert found == (used, BITS_OF_35_NUMBERS)


@pytest.mark.one_variant
@pytest.mark.parametrize("error", ["ImportError", "OSError", "RuntimeError"])
def test_a_broken_llvmlite_costs_nothing_but_speed(shard: str, tmp_path: Path, error: str) -> None:
    binding = tmp_path / "broken" / "llvmlite"
    binding.mkdir(parents=True)
    (binding / "__init__.py").touch()
    (binding / "binding.py").write_text(f"raise {error}('cannot be loaded')")
    path = os.pathsep.join([str(binding.parent), os.environ.get("PYTHONPATH", "")])
    assert kernels_and_bits([shard, ""], PYTHONPATH=path) == ("numpy", BITS_OF_35_NUMBERS)


def test_where_code_may_not_be_made_numpy_does_it(shard: str) -> None:
    """As systemd's MemoryDenyWriteExecute has it: LLVM would abort the worker."""
    assert kernels_and_bits([shard, "refused"]) == ("numpy", BITS_OF_35_NUMBERS)
