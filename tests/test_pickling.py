"""What of a data set cannot be given to other processes is said by its name."""

from __future__ import annotations

import copy
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderd
from loaderd import pickling
from loaderd.errors import LoaderdError, OptionError, SchemaError
from loaderd.pickling import pickled

LOCK = threading.Lock()


class Careful:
    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __call__(self, y: Any) -> Any:
        return y


def careful(y: Any) -> Any:
    with LOCK:
        return y


careful.__module__ = "__main__"  # of a module that can be imported, the name alone would be pickled


def made_here() -> Any:
    lock = threading.Lock()

    def locally(y: Any) -> Any:
        with lock:
            return y

    return locally


def of(function: Any, **options: Any) -> loaderd.Dataset:
    fields = {"b": loaderd.Derived(function, "y")}
    schema = loaderd.Schema({"s": loaderd.Int64()}, fields, {"y": loaderd.Array("s")})
    return loaderd.Dataset("*.tfrecord", schema, **options)


@pytest.mark.parametrize("function", [made_here(), Careful(), careful])
def test_a_function_that_cannot_be_pickled(function: Any):
    with pytest.raises(SchemaError, match=r"^field 'b' must .* cannot pickle '_thread.lock' object") as caught:
        loaderd.Loader(of(function), batch_size=5)
    assert "inside the function" in caught.value.hint


def test_a_function_that_carries_too_much(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pickling, "_MOST_SENT_BYTES", 2 << 20)
    table = np.zeros(3 << 20, np.uint8)

    def look_up(y: Any) -> Any:
        return table[y]

    with pytest.raises(SchemaError, match=r"at most 2 MiB .* got 3 MiB\n") as caught:
        loaderd.Loader(of(look_up), batch_size=5)
    assert "from a file inside the function" in caught.value.hint


def test_a_served_data_set_says_it_too():
    dataset = of(made_here())
    with pytest.raises(LoaderdError, match="field 'b'"):
        pickled((dataset, 1), loaderd.Concat([dataset]))
    with pytest.raises(TypeError, match=r"^cannot pickle '_thread.lock' object$"):
        pickled(LOCK)


def test_a_file_system_that_cannot_be_pickled():
    with pytest.raises(OptionError, match=r"^Storage.filesystem must be one that can be pickled, .* got <.*lock"):
        loaderd.Loader(of(abs, storage=loaderd.Storage(filesystem=LOCK)), batch_size=5)


def test_a_loader_is_not_sent_to_another_process(tmp_path: Path):
    arrays = {"n": np.arange(10)}
    paths = loaderd.testing.write_shards(tmp_path, arrays)
    with loaderd.Loader(paths, loaderd.testing.schema_of(arrays), batch_size=5, workers=1) as loader:
        for send in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match=r"^a Loader cannot be pickled, .*\nSend .* a loaderd.Dataset,"):
                send(loader)
        assert sum(batch.num_records for batch in loader) == 10
