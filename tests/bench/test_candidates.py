"""Every candidate delivers exactly what was written.

Each runs in a process of its own, as it does when measured; but most of those of tf.data here, to import it once.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from harness import reference
from harness.columns import COLUMNS, cached_parquet
from harness.digest import Digest
from harness.interface import Config, configure, load, why_not
from harness.measured import digest
from harness.run_candidate import CandidateError, LeftOut, run_candidate
from harness.synthetic import shard_records, write_shards

RECORDS, SHARDS = 2_000, 3


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    paths = write_shards(tmp_path_factory.mktemp("shards"), RECORDS, num_shards=SHARDS)
    return Config(tuple(map(str, paths)), batch_size=128, epochs=1)


def written(config: Config) -> dict[str, int]:
    """The digest of the records that were written, decoded by the reference."""
    found = Digest()
    for shard in range(SHARDS):
        for stored, scores in shard_records(shard, RECORDS, SHARDS, seed=0):
            decoded = reference.decode_chess(stored, scores, config.dtype)
            found = found.updated(config.delivered(), {"d": stored, "s": scores} if config.packed else decoded)
    return asdict(found)


def delivered(spec: str, config: Config) -> Any:
    try:
        return run_candidate(spec, config, None, timeout_s=60)["digest"]
    except LeftOut as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize(
    "spec",
    [
        # TensorFlow is imported anew in their processes, which takes longer than all the others.
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("tfdata_expert", "tfdata_service", "mp_queue")),
        "torch_dataloader",
        "grain_loader",
        "spdl_pipeline",
        "spdl_pipeline:int8",
        "spdl_checked",
        "lczero",
    ],
)
def test_it_delivers_what_was_written(spec: str, config: Config) -> None:
    assert delivered(spec, config) == written(configure(spec, config)[1])


@pytest.mark.slow  # TensorFlow is imported anew for each
@pytest.mark.parametrize(
    "spec",
    [
        *("tfdata_tuned", "loaderd_batches", "tfdata_seed", "tfdata_batched:int8", "tfdata_expert:int8,noshuffle"),
        *("tfdata_xla", "tfdata_parse:packed"),
    ],
)
def test_tfdata_delivers_what_was_written(spec: str, config: Config) -> None:
    name, configured = configure(spec, config)
    assert digest(load(name).steps(configured), configured.delivered()) == written(configured)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("tfdata_parse", "give it the option packed"),
        ("tfdata_expert:packed", "fields of the chess record"),
        ("lczero:packed", "fields of the chess record"),
    ],
)
def test_it_says_what_it_cannot_deliver(spec: str, reason: str, config: Config) -> None:
    name, configured = configure(spec, config)
    assert reason in (why_not(load(name), configured) or "")
    assert why_not(load(name), replace(configured, packed=not configured.packed)) is None


def test_only_what_checks_crcs_finds_a_changed_bit(config: Config, tmp_path: Path) -> None:
    data = bytearray(Path(config.shards[0]).read_bytes())
    data[100] ^= 1  # in the first record's board
    damaged = tmp_path / "damaged.tfrecord"
    damaged.write_bytes(data)
    one = replace(config, shards=(str(damaged),))
    pytest.importorskip("spdl.pipeline")
    assert delivered("spdl_pipeline", one)["rows"] == RECORDS // SHARDS
    with pytest.raises(CandidateError, match="record 0 is damaged"):
        run_candidate("spdl_checked", one, None, timeout_s=60)


def test_those_of_parquet_deliver_the_same(tmp_path: Path) -> None:
    paths = cached_parquet(tmp_path, RECORDS, row_group_records=100, num_files=SHARDS)
    config = Config(tuple(map(str, paths)), batch_size=128, epochs=1, schema=COLUMNS)
    found = delivered("pyarrow_scanner", config)
    assert found == delivered("loaderd_python", config) and found["rows"] == RECORDS
