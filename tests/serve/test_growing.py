"""Shards are added while trainings run, and the server is started again, reloaded or killed."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import loaderd
from loaderd import Position
from loaderd.errors import OptionError
from tests.helpers.serving import Server, handles_of, wait_ends

Start = Callable[..., Server]
Write = Callable[..., list[Path]]


def connect(server: Server, **options: Any) -> Any:
    return loaderd.connect(f"unix://{server.path}", "train", **{"batch_size": 10, "epochs": 2, **options})


def digest(batch: loaderd.Batch) -> str:
    """Of all that is in it."""
    return hashlib.sha256(b"".join(array.tobytes() for array in batch.values())).hexdigest()


def add_shard(folder: Path, write_numbered: Write) -> Path:
    """In the order of the names it comes first, so that it would change the whole order."""
    return write_numbered([50], "later")[0].rename(folder / "shards" / "+.tfrecord")


def start_again(start: Start, server: Server, how: signal.Signals, says: str) -> Server:
    """Until it ``says`` what the data set has now."""
    if how == signal.SIGHUP:
        server.process.send_signal(how)
    else:
        handles = handles_of(server.family())
        server.process.send_signal(how)
        wait_ends(handles)
        server.close()
        server = start()
    server.wait_line(says)
    return server


@pytest.mark.parametrize(
    ("how", "sharing"),
    [
        (signal.SIGTERM, "independent"),
        (signal.SIGHUP, "mirrored"),
        pytest.param(signal.SIGKILL, "independent", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, "mirrored", marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, "independent", marks=pytest.mark.slow),
    ],
)
def test_a_training_goes_on_with_the_shards_that_it_began_with(
    start: Start, tmp_path: Path, write_numbered: Write, how: signal.Signals, sharing: Any
):
    server = start()
    server.wait_line("memory:")
    with connect(server) as loader:
        expected = list(map(digest, loader))
    with connect(server, sharing=sharing) as loader:
        batches = iter(loader)
        found = [digest(batch) for batch in islice(batches, 7)]
        saved = loader.position.to_json()
        add_shard(tmp_path, write_numbered)
        server = start_again(start, server, how, "train: 350 records in 3 shards")
        with connect(server) as new:
            assert new.statistics().num_records == 350, "a new training gets all shards"
        found += map(digest, batches)
        assert found == expected
        assert loader.statistics().num_records == 300
    with connect(server, start=Position.from_json(saved)) as loader:
        assert list(map(digest, loader)) == expected[7:], "and so does one that resumes"
    with connect(server) as loader:
        loader.load_state_dict(Position.from_json(saved))
        assert list(map(digest, loader)) == expected[7:], "and one that loads its checkpoint when it is connected"


def test_the_shards_of_then_are_not_there_any_more(start: Start, tmp_path: Path, write_numbered: Write):
    server = start()
    server.wait_line("memory:")
    with connect(server) as loader:
        batches = iter(loader)
        next(batches)
        saved = loader.position
    add_shard(tmp_path, write_numbered)
    shard = tmp_path / "shards" / "000.tfrecord"
    away = shard.rename(tmp_path / "away")
    server = start_again(start, server, signal.SIGTERM, "train: 250 records in 2 shards")
    with pytest.raises(OptionError, match=r"belongs to 2 shards, of which 1 are gone: .*/shards/000\.tfrecord\n"):
        connect(server, start=saved)
    write_numbered([50, 100], "others")[1].rename(shard)  # as many records, but others
    server = start_again(start, server, signal.SIGTERM, "train: 350 records in 3 shards")
    with connect(server) as loader:
        with pytest.raises(OptionError, match=r"and .*/shards/000\.tfrecord changed: found 300 records in 2 shards"):
            loader.load_state_dict(saved)
        assert len(list(loader)) == 70, "the loader is none the worse"
        with pytest.raises(OptionError, match="belongs to other data"):
            loader.load_state_dict(saved)  # it has begun
    away.rename(shard)
    with connect(server, start=saved) as loader:
        assert len(list(loader)) == 59


def test_a_process_in_place_of_a_dead_one_serves_the_same_shards(start: Start, tmp_path: Path, write_numbered: Write):
    """Else those that share the records would not have the same ones: one comes back, and one begins."""
    server = start()
    server.wait_line("memory:")
    with connect(server, epochs=1, sharing="split", shard=(0, 2)) as first:
        batches = iter(first)
        ids = next(batches)["id"].tolist()
        add_shard(tmp_path, write_numbered)
        os.kill(server.daemon, signal.SIGKILL)
        server.wait_line("train: 300 records in 2 shards")  # of the one that has ended
        server.wait_line("train: 300 records in 2 shards")
        with connect(server, epochs=1, sharing="split", shard=(1, 2)) as second:
            ids += [number for batch in (*batches, *second) for number in batch["id"].tolist()]
    assert sorted(ids) == list(range(300))
    start_again(start, server, signal.SIGHUP, "train: 350 records in 3 shards")


@pytest.mark.slow
def test_shards_that_are_added_and_damaged_end_no_training(start: Start, tmp_path: Path):
    """New trainings get the error."""
    server = start()
    server.wait_line("memory:")
    with connect(server) as loader:
        batches = iter(loader)
        next(batches)
        (tmp_path / "shards" / "+.tfrecord").write_bytes(b"no TFRecord, as all see\0")
        server = start_again(start, server, signal.SIGTERM, "train: failed")
        assert len(list(batches)) == 59
        with pytest.raises(loaderd.errors.LoaderdError, match=r"\+\.tfrecord"):
            connect(server)


def test_files_of_others_are_not_believed(start: Start, tmp_path: Path, write_numbered: Write):
    """What is in the state folder may be damaged, or be put there by somebody else."""
    folder, own = tmp_path / "state" / "manifests", partial(start, arguments=["--state", "state"])
    server = own()
    server.wait_line("memory:")
    (kept,) = folder.iterdir()
    assert [folder.stat().st_mode & 0o777, kept.stat().st_mode & 0o777] == [0o700, 0o600]
    with connect(server) as loader:
        next(iter(loader))
        saved = loader.position
    add_shard(tmp_path, write_numbered)
    content = kept.read_bytes()
    server = start_again(own, server, signal.SIGTERM, "train: 350 records in 3 shards")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(content)

    def refused(why: str) -> None:
        with pytest.raises(OptionError, match="belongs to other data"):
            connect(server, start=saved)
        server.wait_line(why)

    kept.write_bytes(b"[" * 100_000)
    refused("is not used: ")
    kept.write_bytes(content.replace(b"[[", b"[[7, "))
    refused("is not used: ")
    kept.unlink()
    kept.symlink_to(elsewhere)
    refused("is not used: ")
    kept.unlink()
    os.mkfifo(kept)
    refused("is not used: it must be a file")
    kept.unlink()
    kept.write_bytes(content)
    kept.chmod(0o666)
    refused("is not used: it must belong to user")
    kept.chmod(0o600)
    kept.write_bytes(content.replace(b"/shards/000", b"/later/000"))
    with pytest.raises(
        OptionError, match=r"of which 1 are gone: .*/later/000"
    ):  # it chooses among the shards, and adds none
        connect(server, start=saved)
    kept.write_bytes(content)
    with connect(server, start=saved) as loader:
        assert len(list(loader)) == 59


def test_a_state_folder_that_cannot_be_used(start: Start, tmp_path: Path):
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "manifests").mkdir(mode=0o755)
    server = start(arguments=["--state", "state"])
    assert server.wait_end() == 2
    assert "state/manifests: it must belong to user" in "".join(server.said)
    server = start(XDG_STATE_HOME="/proc/nowhere")
    server.wait_line("end when the server is started again after shards were added. Choose another one with --state")
    server.wait_line("memory:")
