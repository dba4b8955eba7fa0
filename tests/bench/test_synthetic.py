"""The synthetic shards are what they say: TensorFlow reads them, and finds in them what was made."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from harness import reference, synthetic

from loaderd.storage.files import list_shards

NUM_RECORDS, NUM_SHARDS, SEED = 3_001, 3, 7


@pytest.mark.one_variant
@pytest.mark.parametrize("compression", synthetic.COMPRESSIONS)
def test_tensorflow_reads_every_record_as_it_was_made(tmp_path: Path, compression: str) -> None:
    paths = synthetic.write_shards(tmp_path, NUM_RECORDS, num_shards=NUM_SHARDS, seed=SEED, compression=compression)
    assert len(paths) == NUM_SHARDS
    seen = 0
    for shard, path in enumerate(paths):
        made = list(synthetic.shard_records(shard, NUM_RECORDS, NUM_SHARDS, SEED))
        boards, scores = (np.concatenate(part) for part in zip(*made, strict=True))
        found = [tf.train.Example.FromString(raw.numpy()) for raw in tf.data.TFRecordDataset(str(path), compression)]
        assert len(found) == len(boards)
        assert [example.features.feature["d"].bytes_list.value[0] for example in found] == [
            board.tobytes() for board in boards
        ]
        assert [example.features.feature["s"].int64_list.value[0] for example in found] == scores.tolist()
        seen += len(found)
    assert seen == NUM_RECORDS


@pytest.mark.one_variant
@pytest.mark.parametrize("record_size", [None, 4, 194, 20_000])
@pytest.mark.parametrize("compression", synthetic.COMPRESSIONS)
def test_the_plain_reading_finds_every_record_as_it_was_made(
    tmp_path: Path, compression: str, record_size: int | None
) -> None:
    given = {"compression": compression, "record_size": record_size}
    (path,) = synthetic.write_shards(tmp_path, 500, num_shards=1, seed=SEED, **given)
    (file,) = list_shards(path)
    schema = reference.chess() if record_size is None else reference.bits(record_size)
    found = reference.parse(schema, reference.read(file))
    made = [np.concatenate(part) for part in zip(*synthetic.shard_records(0, 500, 1, SEED, record_size), strict=True)]
    assert np.array_equal(found["d"], made[0]) and np.array_equal(found["s"], made[1])
    example = tf.train.Example.FromString(next(reference.read(file)))
    assert example.features.feature["d"].bytes_list.value[0] == made[0][0].tobytes()
    assert example.features.feature["s"].int64_list.value[0] == made[1][0]


def test_records_look_like_chess_records() -> None:
    boards, scores = synthetic.make_records(1_000, 20_000, SEED)
    bits = np.unpackbits(boards, axis=1)
    assert 0.17 < bits[:, 32:1546].mean() < 0.23
    assert 0.01 < bits[:, 1546].mean() < 0.06
    assert not bits[:, 1547:].any()
    assert np.array_equal(boards[:, :4].copy().view(">u4").ravel(), np.arange(1_000, 21_000))
    varint_bytes = {10 if score < 0 else max(1, -(-score.bit_length() // 7)) for score in scores.tolist()}
    assert varint_bytes == {1, 2, 3, 10}, "every length that a varint of a score can have"
    mate_scores = np.abs(scores[bits[:, 1546] == 1])
    assert mate_scores.min() >= 1 and mate_scores.max() > 50
