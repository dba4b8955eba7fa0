"""What a user sees: the names of each package and of what a loader gives, and the options that ``help`` lists."""

from __future__ import annotations

import importlib
import inspect
import re

import pytest

import loaderd
from tests.helpers.numbered import Numbered

PACKAGES = {
    "loaderd": "Array Batch Bits CFunction Codes Columns Concat Dataset Derived Diagnosis Fill FixedRecords Float "
    "Int64 Length Loader Mix OneHot Packed PackedBits Planes Position PowerLaw PrefixCodes Raw RecordRandom Sample "
    "Scatter Schema Shuffle Sparse Spread Statistics Storage StorageCounts TLS board_symmetry connect errors "
    "katago_selfplay schemas testing",
    "loaderd_jax": "batches shard",
    "loaderd_ray": "Findings ServerState connect index load save serve status stop verify",
    "loaderd_tf": "BackupAndRestore TensorBoard Unpack batches distribute from_loader make_dataset packed_schema "
    "schema_from_features unpack",
    "loaderd_torch": "batches shard",
}
MEMBERS = {
    "Batch": "copy get items keys num_records values writable",
    "Diagnosis": "advice cause failed_requests gain last_error limiting_stage outage_s over_s records_per_s stage_ns "
    "steps_per_s takes_ahead verdict waiting_share waiting_spread",
    "Loader": "after batch_size batches_left batches_per_epoch close closed diagnose load_state_dict next_position "
    "position schema seed serve_metrics shard state_dict statistics",
    "Position": "batch batch_size epoch epochs first_epoch from_json hosts listing of past to_json",
    "Statistics": "batches_copied batches_delivered daemon_restarts damages device_wait_s field_s index_cached "
    "index_s kernels num_records num_shards records_delivered records_skipped slot_bytes slots slots_lent stage_s "
    "starts storage wait_s waits window_bytes window_records workers workers_restarted",
    "StorageCounts": "bytes cache_hits cache_misses requests retries",
}


def public(thing: object) -> list[str]:
    return [name for name in dir(thing) if not name.startswith("_")]


@pytest.mark.parametrize("name", PACKAGES)
def test_the_names_of_a_package(name: str):
    try:
        package = importlib.import_module(name)
    except ModuleNotFoundError as error:
        pytest.skip(f"its tests have an environment of their own: {error}")
    assert public(package) == PACKAGES[name].split() == package.__all__
    for each in package.__all__:
        assert getattr(package, each).__doc__, f"{name}.{each} says nothing of itself"


def test_the_names_of_what_a_loader_gives(numbered: Numbered):
    with numbered.loader([40]) as loader:
        said = loader.statistics()
        given = (next(iter(loader)), loader.diagnose(), loader, loader.position, said, said.storage)
        assert {type(each).__name__: " ".join(public(each)) for each in given} == MEMBERS


def test_help_says_the_default_of_each_option():
    listed = dict(re.findall(r"^    - ``(\w+)``(?: \((.*?)\))?: ", loaderd.Loader.__doc__ or "", flags=re.M | re.S))
    options = inspect.signature(loaderd.Loader).parameters
    assert [*listed] == [*options]
    for name, option in options.items():
        default = " ".join(listed[name].split()).partition("default ")[2].replace('"', "'")
        expected = "" if name in ("shards", "schema", "batch_size") else repr(option.default)
        assert (loaderd.Storage() if default == "Storage()" else default) == (
            option.default if name == "storage" else expected
        ), name
