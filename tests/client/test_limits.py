"""Options at their limits, and what users' text may say: an error that names option, range and value, or it works."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import loaderd
from loaderd import Bits, Concat, Dataset, Fill, FixedRecords, Float, Int64, Mix, PackedBits, Position, Raw, testing
from loaderd.client.elements import Elements
from loaderd.errors import DaemonError, LoaderdError, OptionError, SchemaError
from loaderd.options import MAX_EPOCHS, MAX_STEP
from loaderd.plan.passes import Pass
from loaderd.remote.tickets import JSON, MSGPACK, RowsTicket
from loaderd.serve.options import HttpOptions, UnixOptions
from tests.helpers.numbered import Numbered

Make = Callable[[Any], object]

NAN, INF = float("nan"), float("inf")
EMPTY: dict[str, Any] = {}
SCHEMA = loaderd.Schema({"i": Int64()}, {"i": loaderd.Array("i")})
SET = Dataset("no such shard", SCHEMA)
ARRAYS = {"a": np.arange(6)}
LAST = object()
"""No position. ``start`` is checked last: a Loader that has found nothing else to refuse refuses this."""

NO_COUNTS: list[Any] = [
    *(-1, -(2**63), 2**63, 2**64, 10**30, 10**400, True, False, np.bool_(True), np.int32(-1)),
    *(np.uint64(2**64 - 1), 2.0, 0.5, np.float32(2), NAN, INF, -INF, 1e300, "3", "", b"3", None, [], [3], {}),
    *(np.array([1, 2]), np.array([]), 3j, object()),
]
NO_TIMES = [-1, -(10**30), 10**400, True, NAN, INF, -INF, np.float64("nan"), "3", b"3", [3], np.array([1, 2]), 3j]
NO_CHOICES = [0, -1, 2**64, True, NAN, "x", "", b"raise", [], ["raise"], EMPTY, np.array([1, 2]), object()]
NO_PATHS = [0, 1.5, True, NAN, "", b"x", [], ["x"], {}, np.array([1, 2]), object(), "a\0b", "\ud800"]

loader = partial(loaderd.Loader, "no such shard", SCHEMA)
serve = partial(UnixOptions, ("a:b",), unix="socket")
serve_http = partial(HttpOptions, ("a:b",))


@functools.cache
def given() -> loaderd.Loader:
    """Of four batches of six records."""
    folder = tempfile.mkdtemp()
    try:
        paths = testing.write_shards(folder, {"a": np.arange(24)})
        return loaderd.Loader(paths, testing.schema_of(ARRAYS), batch_size=6, workers=1, index_cache="none")
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="module", autouse=True)
def close_given() -> Iterator[None]:
    yield
    given().close()


def of_loader(name: str) -> Make:
    return lambda value: loader(**{"batch_size": 2, name: value, "start": LAST})


def of_connect(name: str) -> Make:
    asked = {"batch_size": 2, "reconnect_timeout": 0, **({"sharing": "mirrored"} if name == "consumers" else {})}
    return lambda value: loaderd.connect("unix:/no such folder/server", "train", **{**asked, name: value})


def schema(*features: Any, field: Any = None) -> loaderd.Schema:
    stored = {"b": PackedBits(64), "i": Int64(), **dict(enumerate(features))}
    return loaderd.Schema({str(name): one for name, one in stored.items()}, {"x": field or loaderd.Array("i")})


COUNTS: dict[str, tuple[Make, str, set[Any]]] = {
    # what: how to give it, how the error calls it, and what it may be beside counts
    **{
        f"Loader({name}=)": (of_loader(name), name, {None} if name in ("epochs", "workers", "seed") else set())
        for name in ("batch_size", "epochs", "workers", "held_batches", "seed")
    },
    "Loader(shard=(0, n))": (lambda n: loader(batch_size=2, shard=(0, n), start=LAST), "shard", set()),
    "Loader(shard=(i, 9))": (lambda i: loader(batch_size=2, shard=(i, 9), start=LAST), "shard", set()),
    **{
        f"connect({name}=)": (of_connect(name), name, {None} if name in ("epochs", "workers") else set())
        for name in ("batch_size", "epochs", "held_batches", "consumers")
    },
    "connect(workers=)": (
        lambda n: loaderd.connect("http://127.0.0.1:1", "a", batch_size=1, workers=n, reconnect_timeout=0),
        "workers",
        {None},
    ),
    "Dataset(seed=)": (lambda n: Dataset("a", SCHEMA, seed=n), "seed", {None}),
    "take()": (SET.take, "take", set()),
    "skip()": (SET.skip, "skip", set()),
    "newest()": (SET.newest, "newest", set()),
    "split(seed=)": (lambda n: SET.split(0.5, 0.5, seed=n), "seed", set()),
    "Mix(epoch_records=)": (lambda n: Mix({"a": 1}, {"a": SET}, n), "epoch_records", {None}),
    "Shuffle(window_records=)": (lambda n: loaderd.Shuffle(n), "window_records", {None}),
    "Shuffle(block_records=)": (lambda n: loaderd.Shuffle(block_records=n), "block_records", set()),
    "Storage(requests=)": (lambda n: loaderd.Storage(requests=n), "requests", set()),
    "Storage(cache_bytes=)": (
        lambda n: loaderd.Storage(cache_bytes=2**20 if type(n) is np.int64 else n),
        "cache_bytes",
        set(),
    ),
    "Position(epoch)": (lambda n: Position(n), "epoch", set()),
    "Position(0, batch)": (lambda n: Position(0, n), "batch", set()),
    "Position(hosts=)": (lambda n: Position(hosts=n), "hosts", {None}),
    "Position(batch_size=)": (lambda n: Position(batch_size=n), "batch_size", {None}),
    "Position(first_epoch=)": (lambda n: Position(9, first_epoch=n), "first_epoch", {None}),
    "Position(epochs=)": (lambda n: Position(epochs=n), "epochs", {None}),
    "Position(past=((n,),))": (lambda n: Position(past=((n,),)), "past", set()),
    "after(…, batches)": (lambda n: given().after(Position(), n), "batches", set()),
    "write_shards(num_shards=)": (
        lambda n: type(n) is np.int64 or testing.write_shards("/dev/null/x", ARRAYS, num_shards=n),
        "num_shards",
        set(),
    ),
    "serve --workers": (lambda n: serve(workers=n), "workers", {None}),
    "serve --max-connections": (lambda n: serve_http(max_connections=n), "max_connections", set()),
    "serve --max-bandwidth": (lambda n: serve_http(max_bandwidth=n), "max_bandwidth", {None}),
    "serve --max-consumers": (lambda n: serve(max_consumers=n), "max_consumers", set()),
    "katago(board_size)": (loaderd.schemas.katago, "board_size", set()),
    "katago(…, num_targets)": (
        lambda n: loaderd.schemas.katago(9, 64 if type(n) is np.int64 else n),
        "num_targets",
        set(),
    ),
    "minigo(board_size)": (loaderd.schemas.minigo, "board_size", set()),
    "PackedBits": (lambda n: schema(PackedBits(n)), "num_bits", set()),
    "Int64((n,))": (lambda n: schema(Int64((n,))), "shape", set()),
    "Float((n,))": (lambda n: schema(Float((n,))), "shape", set()),
    "Raw(…, (n,))": (lambda n: schema(Raw("u1", (n,))), "shape", set()),
    "Bits(…, (n,))": (lambda n: schema(field=Bits("b", (n,))), "shape", set()),
    "Bits(start=)": (lambda n: schema(field=Bits("b", (8,), n)), "start", set()),
    "Spread(…, (n,))": (lambda n: schema(field=loaderd.Spread("i", (n,))), "shape", set()),
    "Fill(…, (n,))": (lambda n: schema(field=loaderd.Planes([Fill(1, (n,))])), "shape", set()),
    "Derived(shape=(n,))": (lambda n: loaderd.Derived(abs, "i", (n,), "u1"), "shape", set()),
}

TIMES: dict[str, tuple[Make, str]] = {
    "Loader(stall_timeout=)": (of_loader("stall_timeout"), "stall_timeout"),
    "connect(stall_timeout=)": (of_connect("stall_timeout"), "stall_timeout"),
    "connect(reconnect_timeout=)": (of_connect("reconnect_timeout"), "reconnect_timeout"),
    "Storage(retry_s=)": (lambda s: loaderd.Storage(retry_s=s), "retry_s"),
    "split()": (lambda s: SET.split(0.5, s), "split"),
    "Mix(weights)": (lambda s: Mix({"a": s}, {"a": SET}), "weight"),
    "serve --idle-timeout": (lambda s: serve(idle_timeout=s), "idle_timeout"),
    "serve --grace": (lambda s: serve(grace=s), "grace"),
    "serve --watchdog": (lambda s: serve(watchdog=s), "watchdog"),
}

CHOICES: dict[str, tuple[Make, str]] = {
    **{
        f"Loader({name}=)": (of_loader(name), name)
        for name in ("remainder", "on_corrupt", "refresh", "storage", "shard", "progress")
    },
    **{f"connect({name}=)": (of_connect(name), name) for name in ("remainder", "sharing", "tls", "shard")},
    "Loader(start=)": (lambda value: loader(batch_size=2, start=value), "start"),
    "Loader(…, schema)": (lambda value: loaderd.Loader("a", value, batch_size=2), "schema"),
    "Dataset(selection=)": (lambda value: Dataset("a", SCHEMA, selection=value), "selection"),
    "split(by=)": (lambda value: SET.split(0.5, 0.5, by=value), "by"),
    "Mix(sets)": (lambda value: Mix({"a": 1}, {"a": value}), "set of a Mix"),
    "Concat([…])": (lambda value: Concat([value]), "set of a Concat"),
    "Position(of=)": (lambda value: Position(of=0 if value is EMPTY else value), "of"),
    "Position(listing=)": (lambda value: Position(listing=[value]), "listing"),
    "load_state_dict()": (lambda value: given().load_state_dict(value), "state"),
    "after(position)": (lambda value: given().after(value, 1), "position"),
    "write_shards(compression=)": (lambda value: testing.write_shards("x", ARRAYS, compression=value), "compression"),
    "damage(how=)": (lambda value: testing.damage("x", how=value), "how"),
    "schema_of()": (lambda value: testing.schema_of(value), "records"),
    "Bits(bit_order=)": (lambda value: Bits("b", (8,), bit_order=value), "bit_order"),
    "FixedRecords(expect=)": (
        lambda value: FixedRecords([("a", "u1")], expect=0 if isinstance(value, dict) else value),
        "expect",
    ),
    "katago(symmetries=)": (
        lambda value: loaderd.schemas.katago(9, symmetries=0 if is_symmetries(value) else value),
        "symmetries",
    ),
}

PATHS: dict[str, tuple[Make, str]] = {
    "Loader(report=)": (of_loader("report"), "report"),
    "connect(report=)": (of_connect("report"), "report"),
    "Loader(index_cache=)": (of_loader("index_cache"), "index_cache"),
    "Storage(cache_dir=)": (lambda value: loaderd.Storage(cache_dir=value), "cache_dir"),
    "TLS(ca=)": (lambda value: loaderd.TLS(ca=value), "TLS.ca"),
    "write_shards(folder)": (lambda value: testing.write_shards(value, ARRAYS), "folder"),
    "damage(shard)": (testing.damage, "shard"),
}


def is_symmetries(value: Any) -> bool:
    """Whether ``value`` is right as symmetries: none of them, or some."""
    return isinstance(value, np.ndarray) or (hasattr(value, "__len__") and len(value) == 0)


def refused(make: Make, value: Any, what: str) -> None:
    """``make(value)`` raises an error of an option, or of a schema, which names ``what`` and says what it may be."""
    with pytest.raises((OptionError, SchemaError)) as caught:
        make(value)
    message = caught.value.message
    assert any(each in message for each in what.split("|")), message
    assert len(message) < 1000 and "must" in message, message
    assert not isinstance(caught.value.__cause__, BaseException)


@pytest.mark.parametrize("of", COUNTS)
def test_counts(of: str):
    make, what, allowed = COUNTS[of]
    for value in NO_COUNTS:
        if not any(value is each for each in allowed):
            refused(make, value, what)
    try:
        make(np.int64(2))
    except LoaderdError as error:  # what is checked behind it
        assert any(each in error.message for each in ("start must be", "server", "is for the network")), error


@pytest.mark.parametrize("of", TIMES)
def test_times_and_shares(of: str):
    for value in NO_TIMES:
        refused(TIMES[of][0], value, TIMES[of][1])


@pytest.mark.parametrize("of", CHOICES)
def test_choices(of: str):
    make, what = CHOICES[of]
    for value in NO_CHOICES:
        if not (of == "Loader(progress=)" and value is True):
            refused(make, value, what)


@pytest.mark.parametrize("of", PATHS)
def test_paths(of: str):
    for value in NO_PATHS:
        refused(PATHS[of][0], value, PATHS[of][1])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: loader(batch_size=10**30, start=LAST), f"batch_size must be at most {2**63 - 1}, got {10**30}"),
        (lambda: loader(batch_size=2, epochs=2**31), f"epochs must be at most {2**30}, got {2**31}"),
        (lambda: loader(batch_size=10**5000), "batch_size must be at most"),
        (lambda: loader(batch_size=2, seed=2**64), f"seed must be an integer from 0 to 2**63 - 1, got {2**64}"),
        (lambda: loader(batch_size=2, workers=10**6), "workers must be at most 248, got 1000000"),
        (
            lambda: loader(batch_size=2, start=Position(2**32, 0)),
            f"the epoch to begin with must be at most {2**30 - 1}, got {2**32}",
        ),
        (
            lambda: loaderd.connect("unix:/x", "a", batch_size=2, start=Position(2**32, 0)),
            f"the epoch to begin with must be at most {2**30 - 1}, got {2**32}",
        ),
        (lambda: Mix({"a": 2, "b": 1}, {"a": SET, "b": SET}), "the weights of a Mix must sum to 1, got 3"),
    ],
)
def test_the_range_is_said(make: Callable[[], object], said: str):
    """No shard is there: where anything were started before the check, that would be the error."""
    with pytest.raises(OptionError) as caught:
        make()
    assert caught.value.message.startswith(said)


def test_a_seed_that_is_drawn(numbered: Numbered):
    shards = numbered.write([10])
    with numbered.loader(shards, seed=None) as first, numbered.loader(shards, seed=None) as second:
        assert first.seed != second.seed and first.position.of["seed"] == first.seed
    with pytest.raises(OptionError, match=r"seed must be .*got None"):
        numbered.loader(shards, seed=None, shard=(0, 2))


# ------------------------------------------------------------------------------------------- users' text


NO_JSON = ["", "null", "[]", "1", '"x"', "true", "{", '{"epoch": true}', "NaN", "[" * 100_000, b"\xff\xfe", b"", "\0"]


def test_text_that_is_a_position():
    there = Position(3, 1, 2, 8, past=((1, 2),), of={"seed": 0})
    assert Position.from_json(there.to_json()) == Position.from_json(there.to_json().encode()) == there
    exact = Position(np.int64(3), past=((np.int64(1),),))  # type: ignore[arg-type]
    assert Position.from_json(exact.to_json()) == exact


@pytest.mark.parametrize("text", [*NO_JSON, '{"pass": 1}', '{"pass": [0, 1, [], null], "of": 3}', '{"of": {}}', None])
def test_text_that_is_no_pass(text: Any):
    with pytest.raises(OptionError):
        given()._pass_from_json(text)


@pytest.mark.parametrize("name", [*(each for each in NO_JSON if each != b""), '{"dataset": "a", "more": 1}'])
def test_text_that_is_no_ticket(name: Any):
    for kind in (JSON, MSGPACK):
        with pytest.raises(OptionError):
            RowsTicket.decode(name if isinstance(name, bytes) else name.encode(), kind)


@pytest.mark.parametrize("value", [v for v in NO_COUNTS if isinstance(v, (bool, int, float, str))])
def test_a_ticket_of_no_rows(value: Any):
    def decode(ticket: dict[str, Any]) -> None:
        RowsTicket.decode(json.dumps(ticket).encode(), JSON)

    ticket = {"data": "d", "rows": [[0, 0, 0, 1]]}
    decode(ticket)
    for place in range(4):
        row = [0, 0, 0, 1]
        row[place] = value
        with pytest.raises(OptionError):
            decode({**ticket, "rows": [row]})
    for name in ("data", "rows", "listing", "compression", "protocol"):
        if not (isinstance(value, str) and name == "data"):
            with pytest.raises(OptionError):
                decode({**ticket, name: value})


class Arrays(Elements):
    """What the bindings have in common."""

    def __iter__(self) -> Any:
        return self.loader._iterate()


NO_TEXT = [None, 3, [], [[1], [1, 2]], np.array(["a", None])]


@pytest.mark.parametrize("state", [None, 3, "x", [], {}, *({"position": each} for each in NO_TEXT)])
def test_a_state_that_is_none(state: Any):
    elements = Arrays(given(), {"a": "a"}, 0)
    with pytest.raises(OptionError, match="the state must be what state_dict"):
        elements.load_state_dict(state)


@pytest.mark.parametrize("text", [*(each for each in NO_JSON if isinstance(each, str))])
def test_a_state_of_text_that_is_no_position(text: str):
    elements = Arrays(given(), {"a": "a"}, 0)
    for position in (text, np.frombuffer(text.encode(), np.uint8)):
        with pytest.raises(OptionError, match="a position must be what Position"):
            elements.load_state_dict({"position": position})


# ------------------------------------------------------------------------------ what is known only later


def test_a_position_many_passes_later_takes_no_time():
    there = given().after(Position(1, 2), 4 * 10**8 + 3)
    assert (there.epoch, there.batch) == (10**8 + 2, 1)


def test_a_loader_lives_on_where_it_was_asked_for_too_much(numbered: Numbered):
    with numbered.loader([40]) as loader:
        for ask in (
            lambda: loader.load_state_dict(Position(2**32, 0)),
            lambda: loader.load_state_dict(Position(MAX_EPOCHS, 0)),
            lambda: loader._fetch(Pass(2**40, 1), 0),
            lambda: loader._fetch(Pass(0, None), MAX_STEP),
            lambda: loader._fetch(Pass(0, None), 2**60),
            lambda: loader._fetch(Pass(-1, 1), 0),
            lambda: loader._seek_iteration(2**40),
            lambda: loader.after(Position(), 2**70),
        ):
            with pytest.raises(OptionError, match="must be"):
                ask()
        assert sum(len(batch["id"]) for batch in loader) == 40 and loader.statistics().daemon_restarts == 0
        loader.load_state_dict(Position(MAX_EPOCHS - 1, 2))
        assert sum(1 for _ in loader) == 2 and loader.position.epoch == MAX_EPOCHS and len(loader) == 4
        with pytest.raises(OptionError, match="the epoch to begin with must be at most"):
            next(iter(loader))


@pytest.mark.parametrize("remainder", ["short", "drop", "carry"])
def test_the_most_epochs(numbered: Numbered, remainder: Any):
    options = {"batch_size": 10, "epochs": MAX_EPOCHS, "remainder": remainder, "workers": 1, "seed": 2**63 - 1}
    with numbered.loader([40], **options) as loader:
        assert len(loader) == 4 * MAX_EPOCHS and next(iter(loader)).num_records == 10
        loader.load_state_dict(Position(MAX_EPOCHS - 1, 3))
        assert len(next(iter(loader))["id"]) == 10 and loader.position.epoch == MAX_EPOCHS


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 2**31},
        {"batch_size": 2**63 - 1},
        {"held_batches": 2**63 - 1},
        {"batch_size": 2**40, "held_batches": 2**40},
    ],
    ids=str,
)
def test_more_than_the_memory_is_said_in_bytes(numbered: Numbered, options: dict[str, Any]):
    with pytest.raises(DaemonError, match=r"not enough memory: [\d,]+ MiB are needed .*, [\d,]+ MiB are free"):
        numbered.loader([40], **{"batch_size": 2**20, **options})
