"""The data set of the server that ``_served`` starts: that of the config which its environment holds."""

from __future__ import annotations

import json
import os

from harness.interface import Config

import loaderd

CONFIG_VARIABLE = "LOADERD_BENCH_CONFIG"


def served_config() -> Config:
    """The config that the processes of the server and of its consumers are about."""
    return Config(**json.loads(os.environ[CONFIG_VARIABLE]))


if CONFIG_VARIABLE in os.environ:
    _options = served_config().loader_options()
    dataset = loaderd.Dataset(_options["shards"], _options["schema"], shuffle=_options["shuffle"])
