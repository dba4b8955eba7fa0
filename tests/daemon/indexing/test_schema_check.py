"""When a schema is said to be wrong: which blocks are tried, and what is made of the answers."""

from __future__ import annotations

import pytest

from loaderd.daemon.indexing.schema_check import SchemaCheck
from loaderd.errors import RecordMismatchError, WorkerError
from loaderd.ipc.worker_messages import CheckTask


def check_of(block: int, any_fits: bool) -> CheckTask:
    return CheckTask(0, block, 1, None, any_fits)


def tried(probe: SchemaCheck, *, fits: int | None) -> list[int]:
    """Answer until the probe is finished: only block ``fits`` does. Returns the blocks that it asked for."""
    found = []
    while (task := probe.next_task()) is not None:
        assert isinstance(task.work, CheckTask) and probe.next_task() is None
        found.append(task.work.block)
        if task.work.block == fits:
            probe.done(task, ("numpy", []))
        else:
            probe.failed(task, RecordMismatchError(f"block {task.work.block} differs", hint="Change it."))
    assert probe.finished
    return found


def test_the_first_record_tells_where_nothing_is_skipped():
    probe = SchemaCheck(check_of, 100, skips=False)
    assert tried(probe, fits=None) == [0]
    assert str(probe.error) == "block 0 differs\nChange it."
    probe = SchemaCheck(check_of, 100, skips=False)
    assert tried(probe, fits=0) == [0] and probe.error is None


@pytest.mark.parametrize(
    ("num_blocks", "blocks"), [(1, [0]), (3, [0, 1, 2]), (8, list(range(8))), (100, [0, 12, 25, 37, 50, 62, 75, 87])]
)
def test_where_some_are_skipped_any_block_will_do(num_blocks: int, blocks: list[int]):
    for number, fits in enumerate(blocks):
        probe = SchemaCheck(check_of, num_blocks, skips=True)
        assert tried(probe, fits=fits) == blocks[: number + 1] and probe.error is None
    probe = SchemaCheck(check_of, num_blocks, skips=True)
    assert tried(probe, fits=None) == blocks
    which = "the only block" if num_blocks == 1 else f"{len(blocks)} blocks, spread over all of them,"
    text = f"no record of {which} fits the schema; the first of them: block 0 differs\nChange it."
    assert str(probe.error) == text


def test_workers_that_are_lost_at_it():
    probe = SchemaCheck(check_of, 1, skips=True)
    task = probe.next_task()
    assert task is not None
    lost = WorkerError("3 workers in a row were lost")
    probe.given_up(task, lost, False)
    assert probe.finished and probe.error is lost
