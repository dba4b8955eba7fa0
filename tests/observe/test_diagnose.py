"""The diagnosis as a pure function: snapshots in, a verdict out."""

from __future__ import annotations

from typing import Any

import pytest

from loaderd.observe.diagnose import Diagnosis, diagnose, diagnose_samples
from loaderd.options import MAX_WORKERS
from loaderd.shm.page import NUM_WAITS
from loaderd.snapshots import Facts, Outage, Snapshot

FACTS = Facts(
    fields=("board", "slow"),
    derived=("slow",),
    workers=2,
    cores=4,
    batch_size=100,
    held_batches=4,
    slots=8,
    steps_per_epoch=100,
    windows=2,
    shards=3,
    compressed=0,
    storage=("ext4",),
    has_bits=True,
    batch_bytes=640_000,
    packed_bytes=20_000,
)
STAGES = ("read", "inflate", "frames", "check", "parse", "order", "fill", "slot", "window")
START = Snapshot(
    time_s=1000.0,
    batches=50,
    records=5000,
    wait_s=3.0,
    waits=(0,) * NUM_WAITS,
    copy_s=0.0,
    takes_ahead=False,
    stage_s=dict.fromkeys(STAGES, 1.0),
    field_s={"board": 2.0, "slow": 3.0},
)


def after(
    seconds: float = 5.0,
    *,
    wait_s: float,
    board: float = 0.1,
    slow: float = 0.1,
    batches: int = 500,
    waits: dict[int, int] | None = None,
    **others: Any,
) -> Snapshot:
    """A later snapshot: stages by name, in seconds of all workers; everything else as fields of it."""
    stage_s = {stage: START.stage_s[stage] + others.pop(stage, 0.01) for stage in STAGES}
    return START._replace(
        time_s=START.time_s + seconds,
        batches=START.batches + batches,
        records=START.records + 100 * batches,
        wait_s=START.wait_s + wait_s,
        waits=tuple((waits or {}).get(number, 0) for number in range(NUM_WAITS)),
        stage_s=stage_s,
        field_s={"board": 2.0 + board, "slow": 3.0 + slow},
        **{"worker_cpu_s": 10.0, "idle_s": 10.0, **others},
    )


def found(now: Snapshot, **facts: Any) -> Diagnosis:
    return diagnose(START, now, FACTS._replace(**facts))


@pytest.mark.parametrize(
    ("now", "facts", "verdict", "limiting"),
    [
        (after(wait_s=0.1, slot=9.0), {}, "the model", ""),
        (after(wait_s=0.1, thread_cpu_s=4.5, consumer_cpu_s=4.6), {}, "the consumer's Python", ""),
        (
            after(wait_s=0.1, thread_cpu_s=2.5, thread_delay_s=2.0, consumer_cpu_s=2.6),
            {},
            "the consumer's Python",
            "",
        ),
        (after(wait_s=0.1, thread_cpu_s=4.5, consumer_cpu_s=8.0), {}, "the model", ""),
        (after(wait_s=0.1, thread_cpu_s=4.5, consumer_cpu_s=4.6, uses_accelerator=True), {}, "the model", ""),
        (after(wait_s=0.1, thread_cpu_s=1.0, consumer_cpu_s=1.0), {}, "the model", ""),
        (after(wait_s=3.0, board=9.0), {}, "workers", "unpack"),
        (after(wait_s=3.0, parse=5.0, order=2.0), {}, "workers", "parse"),
        (after(wait_s=3.0, frames=4.0, check=3.0, parse=5.0), {}, "workers", "check"),
        (after(wait_s=3.0, slow=8.0), {}, "one field", "slow"),
        (after(wait_s=3.0, slow=8.0), {"derived": ()}, "workers", "unpack"),
        (after(wait_s=3.0, read=8.0), {}, "storage", "read"),
        (after(wait_s=3.0, inflate=8.0), {"compressed": 2}, "storage", "inflate"),
        (after(wait_s=3.0, window=8.0, read=1.0, board=1.5), {}, "storage", "read"),
        (after(wait_s=1.0, slot=6.0), {}, "too few batches held", ""),
        (after(wait_s=2.5, slot=4.0), {}, "too few batches held", ""),
        (after(wait_s=2.5, slot=3.0, inflate=6.0), {}, "storage", "inflate"),
        (after(wait_s=2.5, slot=3.0, window=1.5, inflate=6.0), {}, "storage", "inflate"),
        (after(wait_s=2.5, slot=6.0, window=2.0, inflate=6.0), {}, "storage", "inflate"),
        (after(wait_s=0.0, copy_s=1.0), {}, "too few batches held", ""),
        (after(wait_s=0.1, device_wait_s=2.0), {}, "copies to the device", "copy to the device"),
        (after(wait_s=1.0, device_wait_s=2.0, board=9.0), {}, "copies to the device", "copy to the device"),
        (after(wait_s=2.0, device_wait_s=1.0, board=9.0), {}, "workers", "unpack"),
        (after(wait_s=0.1, device_wait_s=0.2), {}, "the model", ""),
        (after(wait_s=0.0, batches=1), {}, "nothing yet", ""),
        (after(wait_s=4.9, batches=0, read=9.0), {}, "storage", "read"),
        (after(wait_s=4.9, batches=0), {}, "nothing yet", ""),
    ],
)
def test_verdicts(now: Snapshot, facts: dict[str, Any], verdict: str, limiting: str):
    diagnosis = found(now, **facts)
    assert (diagnosis.verdict, diagnosis.limiting_stage) == (verdict, limiting)
    assert diagnosis.gain >= 1 and str(diagnosis)


OUTAGE = Outage(34.0, 17, "s3://b/a: AWS Error SLOW_DOWN")


@pytest.mark.parametrize(
    "worked",
    [
        {"window": 9.0, "parse": 0.5},  # each load is refused at once, and rests
        {"read": 9.0},  # requests are made again and again
        {},  # reads do not return
    ],
)
@pytest.mark.parametrize("batches", [0, 300])
def test_an_outage_is_no_lack_of_workers(worked: dict[str, float], batches: int):
    now = after(wait_s=4.0, batches=batches, outage=OUTAGE, **worked)
    for storage, verdict in (("s3", "storage does not answer"), ("servers", "the servers do not answer")):
        diagnosis = found(now, storage=(storage,))
        assert (diagnosis.verdict, diagnosis.limiting_stage, diagnosis.gain) == (verdict, "", 1.0)
        assert (diagnosis.outage_s, diagnosis.failed_requests, diagnosis.last_error) == OUTAGE
        assert "for 34 s; 17 requests failed, the last one: s3://b/a: AWS Error SLOW_DOWN" in diagnosis.cause
        assert "workers" not in diagnosis.advice and "times the steps" not in str(diagnosis)


def test_an_outage_that_the_training_has_not_met_yet_is_a_remark():
    diagnosis = found(after(wait_s=0.1, slot=9.0, outage=OUTAGE))
    assert diagnosis.verdict == "the model" and "; no answer from the storage for 34 s" in diagnosis.cause
    short = found(after(wait_s=3.0, read=9.0, outage=OUTAGE._replace(for_s=2.0)), storage=("s3",))
    assert short.verdict == "storage", "one request takes long"


def test_who_waits_for_a_gpu_keeps_a_core_busy():
    """As Python code does: that it may be either is said."""
    busy = {"wait_s": 0.1, "thread_cpu_s": 4.5, "consumer_cpu_s": 4.6}
    assert "Python code, or how it waits for the GPU" in found(after(**busy, uses_accelerator=True)).cause
    assert "GPU" not in found(after(**{**busy, "thread_cpu_s": 1.0}, uses_accelerator=True)).cause


def test_times_that_were_made_up():
    """A server diagnoses by pages in which consumers may write anything."""
    now = after(wait_s=3.0, slow=8.0, board=-8.0, **dict.fromkeys(STAGES, 0.0))
    assert found(now).verdict == "one field"


def test_rates_are_of_the_time_between_and_not_since_the_start():
    diagnosis = found(after(wait_s=1.0, slow=2.0, batches=250))
    assert diagnosis.waiting_share == pytest.approx(0.2) and diagnosis.steps_per_s == 50
    assert diagnosis.records_per_s == 5000 and diagnosis.over_s == 5
    assert diagnosis.stage_ns["slow"] == pytest.approx(2.0e9 / 25_000)


def test_who_takes_batches_ahead_is_not_who_waits():
    ahead = found(after(wait_s=3.0, board=9.0, takes_ahead=True))
    assert ahead.takes_ahead and "waits for data for up to 60%" in str(ahead)
    assert "waits for data for 60%" in str(found(after(wait_s=3.0, board=9.0)))


def test_how_waits_are_spread():
    waits = {12: 300, 15: 60}  # 500 batches: 140 without a wait, 300 of 8 to 17 ms, 60 of 67 to 134 ms
    low, high = found(after(wait_s=2.5, waits=waits)).waiting_spread
    own_s = 2.5 / 500
    assert low == 0.0 and high == pytest.approx(0.1007 / (0.1007 + own_s), rel=0.01)
    assert found(after(wait_s=0.0)).waiting_spread == (0.0, 0.0)


FULL: dict[str, Any] = {"workers": MAX_WORKERS, "cores": MAX_WORKERS, "has_bits": False}


@pytest.mark.parametrize(
    ("now", "facts", "advice", "gain"),
    [
        # Steps of 10 ms, of which 6 are waiting: two workers take 10 ms, four would take 5; the model takes 4.
        (after(wait_s=3.0, board=9.0), {}, "workers=4 instead of 2.", 2),
        # No step is shorter than what the consumer does.
        (after(wait_s=1.0, board=9.0), {"cores": 16}, "workers=3 instead of 2.", 1.25),
        # More workers compute on no more than the cores that are idle.
        (after(wait_s=3.0, board=9.0, idle_s=5.0), {}, "workers=3 instead of 2.", 1.5),
        (after(wait_s=3.0, board=9.0, idle_s=2.6), {}, "workers=3 instead of 2.", 2.52 / 2),
        # A worker keeps a core busy, the consumer a quarter of one: with 1.6 times the steps, both cores are busy.
        (
            after(wait_s=3.5, parse=4.5, worker_cpu_s=5.0, consumer_cpu_s=1.25, idle_s=3.75),
            {"workers": 1, "cores": 2},
            "workers=2 instead of 1.",
            1.6,
        ),
        # They wait most of the time, so four times as many would do; but what they compute needs cores, too.
        (after(wait_s=4.5, slow=9.5, worker_cpu_s=2.0, idle_s=0.5), {}, "workers=8 instead of 2.", 1.25),
        (after(wait_s=4.5, slow=9.5, worker_cpu_s=2.0, idle_s=0.0), {}, "workers=8 instead of 2.", 1),
        # Others use the cores that they lack, so nobody knows what they would get.
        (
            after(wait_s=4.5, slow=9.5, worker_cpu_s=2.0, delay_s=2.5, idle_s=0.0, cores=2),
            {"cores": 2},
            "workers=8 instead of 2.",
            1,
        ),
        (
            after(wait_s=4.5, slow=9.5, worker_cpu_s=3.0, delay_s=2.5, idle_s=0.0, cores=2),
            {"cores": 2},
            "Make the function of 'slow' cheaper, by numpy on whole arrays; or store what it gives in the shards.",
            1,
        ),
        # No more are advised than a loader takes.
        (
            after(wait_s=4.5, slow=450.0, worker_cpu_s=1.0),
            {"workers": 100},
            f"workers={MAX_WORKERS} instead of 100.",
            MAX_WORKERS / 100,
        ),
        (
            after(wait_s=4.5, parse=1e3, worker_cpu_s=1e3),
            FULL,
            f"Give it more than {MAX_WORKERS} cores, and workers={MAX_WORKERS}.",
            1,
        ),
        # The stage that goes leaves its cores to the others.
        (
            after(wait_s=4.0, inflate=8.0, parse=1.75, worker_cpu_s=8.0, consumer_cpu_s=2.0, idle_s=0.0),
            {"compressed": 3, "cores": 2},
            "Store the shards uncompressed.",
            10 / (10 - 6.4),
        ),
    ],
)
def test_the_gain_is_arithmetic(now: Snapshot, facts: dict[str, Any], advice: str, gain: float):
    diagnosis = found(now, **facts)
    assert diagnosis.advice == advice and diagnosis.gain == pytest.approx(gain, rel=0.02)


@pytest.mark.parametrize(
    ("copies_ahead", "facts", "gain"),
    [
        (0, {}, 10 / 7),  # steps of 10 ms, of which 3 are copying: those of before are hidden
        (2, {}, 10 / (7 + 3 / 32)),
        (2, {"has_bits": False}, 10 / 8.5),
    ],
)
def test_the_gain_of_copies_that_are_not_waited_for(copies_ahead: int, facts: dict[str, Any], gain: float):
    diagnosis = found(after(wait_s=0.0, device_wait_s=1.5, copies_ahead=copies_ahead), **facts)
    assert diagnosis.gain == pytest.approx(gain) and diagnosis.stage_ns["copy to the device"] == 30_000


@pytest.mark.parametrize(
    ("now", "facts", "cause", "advice"),
    [
        (after(wait_s=3.0, board=9.0), {"cores": 2}, "", "pip install 'llvmlite"),
        (
            after(wait_s=3.0, board=9.0, kernels="compiled", uses_accelerator=True),
            {"cores": 2},
            "",
            'unpack="device"',
        ),
        (after(wait_s=3.0, board=9.0, kernels="compiled"), {"cores": 2}, "", "more than 2 cores"),
        (after(wait_s=3.0, parse=9.0), {"cores": 2}, "", "pip install 'llvmlite"),
        (after(wait_s=3.0, frames=9.0), {"cores": 2}, "", "pip install 'llvmlite"),
        (after(wait_s=3.0, parse=9.0, kernels="compiled"), {"cores": 2}, "", "more than 2 cores"),
        (after(wait_s=3.0, parse=9.0), {"cores": 2, "has_bits": False}, "", "more than 2 cores"),
        (after(wait_s=3.0, parse=9.0, delay_s=2.5), {}, "cores are scarce: workers could run", "workers=4"),
        (after(wait_s=3.0, parse=9.0, memory_stall_s=2.0), {}, "memory pressure", "workers=4"),
        (after(wait_s=3.0, slow=9.0), {}, "takes 180,000 ns a record", "function of 'slow' cheaper"),
        (after(wait_s=3.0, slow=9.0, worker_cpu_s=0.5), {"cores": 2}, "waits rather than computes", "workers=5"),
        (after(wait_s=3.0, inflate=9.0), {"compressed": 3}, "3 of 3 shards", "uncompressed"),
        (after(wait_s=3.0, read=9.0), {"storage": ("nfs4",)}, "a slow mount (nfs4)", "workers=4"),
        (after(wait_s=3.0, read=9.0), {"storage": ("nfs4",), "cores": 2}, "a slow mount (nfs4)", "local disk"),
        (after(wait_s=3.0, read=9.0, worker_cpu_s=1), {"storage": ("s3",)}, "slow bucket", "Take larger windows"),
        (after(wait_s=3.0, read=9.0, asked_bytes=10**9, fetched_bytes=9 * 10**8), {}, "a cold page", "faster disk"),
        (after(wait_s=3.0, read=9.0), {"storage": ("servers",)}, "or the network to them", "fewer bytes"),
        (after(wait_s=3.0, read=9.0, memory_stall_s=2.0), {}, "memory pressure", "smaller windows"),
        (after(wait_s=0.0, slot=9.0), {}, "before they are asked for", "workers=1"),
        (after(wait_s=0.0, copy_s=1.0), {}, "more than held_batches=4", "held_batches=16"),
        (after(wait_s=0.0, device_wait_s=2.5), {}, "5.0 ms for the copy of each, 0.6 MiB: 50%", "prefetch=2"),
        (
            after(wait_s=0.0, device_wait_s=2.5, copies_ahead=2),
            {},
            "50% of the time",
            '32 times smaller, and unpack them there: unpack="device"',
        ),
        (after(wait_s=0.0, device_wait_s=2.5, copies_ahead=2), {"has_bits": False}, "", "dtype of fewer bytes"),
        (
            after(wait_s=3.0, board=9.0, kernels="compiled", uses_accelerator=True),
            {"cores": 2, "of_server": True},
            "",
            'Unpack on the device: unpack="device"',
        ),
    ],
)
def test_causes_and_advice(now: Snapshot, facts: dict[str, Any], cause: str, advice: str):
    diagnosis = found(now, **facts)
    assert cause in diagnosis.cause and advice in diagnosis.advice


# Of two workers, in 5 s: 10 s, of which they had a core for 2.
LACK: dict[str, Any] = {"wait_s": 2.0, "worker_cpu_s": 2.0, "board": 4.0, "slot": 5.0, "idle_s": 0.0}


@pytest.mark.parametrize(
    ("now", "facts", "cause", "advice"),
    [
        (after(**LACK, delay_s=6.0), {}, "workers could run, and had no core, for 60% of the time", "more cores"),
        (after(**LACK, delay_s=6.0, cores=2, nice=15), {}, "others use 1.6 of the 2 cores", "more cores"),
        (after(**LACK, delay_s=6.0, cores=2, nice=15), {}, "the nice value 15", "more cores"),
        (after(**LACK, delay_s=6.0, cores=1), {}, "fewer cores than workers: 1 and 2", "more cores"),
        (after(**LACK, stopped_s=6.0), {}, "stopped by a signal for 60% of the time", "cpulimit"),
        # Stops that were not seen while they lasted: the workers computed for 8 s, and had a core for 2.
        (after(**{**LACK, "board": 8.0}, stopped_s=1.0), {}, "stopped by a signal for 6", "cpulimit"),
        (after(**LACK, throttled_s=2.0), {}, "stopped for 40% of the time, its quota", "cpu.max"),
        (after(wait_s=3.0, parse=9.0, worker_cpu_s=5.0), {"cores": 1}, "fewer cores than workers: 1 and 2", "cores"),
        (
            after(wait_s=0.0, thread_delay_s=4.0, thread_cpu_s=0.5, consumer_cpu_s=0.5),
            {},
            "the thread that takes batches could run, and had no core, for 80% of the time",
            "more cores",
        ),
        # Nothing that they did has ended in this time.
        (after(**{**LACK, "wait_s": 4.9, "board": 0.1, "slot": 0.1}, delay_s=9.0), {}, "for 90% of the time", "more"),
    ],
)
def test_a_lack_of_cpu_is_no_lack_of_batches_or_workers(
    now: Snapshot, facts: dict[str, Any], cause: str, advice: str
):
    diagnosis = found(now, **facts)
    assert (diagnosis.verdict, diagnosis.limiting_stage, diagnosis.gain) == ("too little CPU", "", 1.0)
    assert cause in diagnosis.cause and advice in diagnosis.advice and "times the steps" not in str(diagnosis)


@pytest.mark.parametrize(
    ("now", "facts", "verdict"),
    [
        # They use up the cores themselves: what they do is the reason.
        (after(wait_s=3.0, board=9.0, worker_cpu_s=5.0, delay_s=4.0), {"cores": 1, "workers": 1}, "workers"),
        # Requests take longer than cores are missing.
        (after(wait_s=4.0, read=8.0, worker_cpu_s=0.5, delay_s=1.0), {"storage": ("s3",)}, "storage"),
        (after(wait_s=4.0, slow=8.0, worker_cpu_s=0.5, delay_s=1.0), {}, "one field"),
        # With all cores of the world, the field would still take its time.
        (after(wait_s=4.0, slow=8.0, worker_cpu_s=3.0, delay_s=6.0), {}, "one field"),
        (after(wait_s=4.0, inflate=8.0, worker_cpu_s=3.0, delay_s=6.0), {"compressed": 3}, "storage"),
        (after(wait_s=1.0, slot=8.0, worker_cpu_s=1.0, delay_s=0.4), {}, "too few batches held"),
        # It computes for longer than it waits for a core.
        (
            after(wait_s=0.0, thread_delay_s=2.0, thread_cpu_s=2.5, consumer_cpu_s=2.6),
            {},
            "the consumer's Python",
        ),
        (after(wait_s=0.0, slot=9.0, delay_s=9.0), {}, "the model"),
    ],
)
def test_a_lack_of_cpu_that_is_not_what_the_training_waits_for(now: Snapshot, facts: dict[str, Any], verdict: str):
    assert found(now, **facts).verdict == verdict


@pytest.mark.parametrize("storage", ["s3", "nfs4", "ext4", "servers"])
def test_storage_is_not_said_to_give_more_to_more_workers(storage: str):
    diagnosis = found(after(wait_s=4.0, read=9.0, worker_cpu_s=1.0), storage=(storage,))
    assert "local disk" in diagnosis.advice if storage == "s3" else diagnosis.gain == 1


def sample(time_s: float, wait_s: float, batches: int) -> Snapshot:
    return START._replace(time_s=1000 + time_s, wait_s=wait_s, batches=batches, records=100 * batches)


def test_the_start_of_a_training_is_not_what_is_asked_about():
    samples = [sample(0, 0, 0), sample(1, 1, 0), sample(2, 1.9, 1), sample(3, 2.4, 50), sample(4, 2.4, 150)]
    assert diagnose_samples(samples, FACTS).verdict == "nothing yet"
    assert diagnose_samples([], FACTS).verdict == "nothing yet"
    found = diagnose_samples([*samples, sample(5, 2.4, 250)], FACTS)
    assert found.waiting_share == 0 and found.over_s == 2


def test_who_waits_for_the_first_batch_for_long_is_told_why():
    samples = [sample(second, second, 0)._replace(stage_s={**START.stage_s, "read": second}) for second in range(6)]
    found = diagnose_samples(samples, FACTS)
    assert (found.verdict, found.limiting_stage) == ("storage", "read") and found.waiting_share == 1
    assert diagnose_samples(samples[:4], FACTS).verdict == "nothing yet"


def test_of_tasks_that_have_not_ended_nothing_is_known():
    """A function that takes many seconds, or hangs: only the little that was done before is counted."""
    hanging = found(after(wait_s=5.0, batches=0, read=0.001, slow=0.0))
    assert hanging.verdict == "nothing yet" and hanging.gain == 1
    assert "the workers have been at the same tasks for most of 5.0 s" in str(hanging)


def test_a_consumer_of_a_server_whose_workers_are_busy_with_others():
    starved = after(wait_s=4.5, board=0.5, batches=15, worker_cpu_s=1.0)
    found_ = found(starved, of_server=True)
    assert (found_.verdict, found_.limiting_stage) == ("workers", "")
    assert found_.cause == "the workers are busy with other consumers of the server"
    assert found_.advice == "`loaderd serve --workers 8` instead of 2." and found_.gain == pytest.approx(4.0)
    computing = found(starved._replace(worker_cpu_s=9.0), of_server=True, cores=2)
    assert computing.advice == "Give it more than 2 cores, and `loaderd serve --workers 3`."
    assert found(starved).verdict == "nothing yet", "its own workers have no other consumers"


def test_a_consumer_of_a_server_is_told_how_to_change_the_server():
    def of_server(now: Snapshot, **facts: Any) -> str:
        return str(found(now, of_server=True, **facts))

    assert "`loaderd serve --workers 5` instead of 2" in of_server(after(wait_s=3.0, slow=9.0, worker_cpu_s=0.5))
    assert "workers" not in of_server(after(wait_s=0.0, slot=9.0)), "they may be needed by others"
    hanging = of_server(after(wait_s=5.0, batches=0))
    assert "at the same tasks or at other consumers'" in hanging and "-USR1 loaderd-server" in hanging


def test_what_was_long_ago_does_not_count():
    samples = [sample(second, min(second, 2), 100 * second + 1) for second in range(8)]
    assert diagnose_samples(samples[:3], FACTS).verdict == "nothing yet", "it has just begun"
    busy = [one._replace(number=5, stage_s={**START.stage_s, "read": one.time_s}) for one in samples[:3]]
    assert diagnose_samples(busy, FACTS).waiting_share == 1
    assert diagnose_samples(samples, FACTS).waiting_share == 0
