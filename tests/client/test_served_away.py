"""A server that is started again while the shards are away: its consumers wait for them, as for the server itself."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from loaderd.errors import NoShardsError
from tests.helpers.numbered import Numbered
from tests.helpers.restarted import Restarted

NUM_RECORDS = 150
SAID = "shards/*.tfrecord matches no file"


class Mounted:
    """A server, and its shards, which can be taken away while it is started again."""

    def __init__(self, server: Restarted) -> None:
        self.server = server
        self._here, self._away = server.folder / "shards", server.folder / "away"

    def restart_without_shards(self) -> None:
        self.server.kill()
        self._here.rename(self._away)
        self.server.start()
        self.server.now.wait_line(SAID)

    def bring_back(self) -> None:
        self._away.rename(self._here)


@pytest.fixture
def mounted(tmp_path: Path, numbered: Numbered) -> Iterator[Mounted]:
    numbered.write([100, 50])
    server = Restarted(tmp_path)
    yield Mounted(server)
    server.kill()


class WhenSaid(logging.Handler):
    """Calls ``then`` once: when a text is logged."""

    def __init__(self, text: str, then: Callable[[], None]) -> None:
        super().__init__()
        self._text = text
        self._then: list[Callable[[], None]] = [then]

    def emit(self, record: logging.LogRecord) -> None:
        if self._text in record.getMessage() and self._then:
            self._then.pop()()


@pytest.mark.parametrize("sharing", ["independent", pytest.param("mirrored", marks=pytest.mark.slow)])
def test_its_consumers_go_on_when_the_shards_are_back(mounted: Mounted, numbered: Numbered, sharing: Any):
    with mounted.server.connect(5, sharing=sharing) as loader:
        batches = iter(loader)
        found = numbered.check(next(batches))
        mounted.restart_without_shards()
        with pytest.raises(NoShardsError):
            mounted.server.connect(5)
        handler = WhenSaid(SAID, mounted.bring_back)
        logging.getLogger("loaderd").addHandler(handler)
        try:
            for batch in batches:
                found += numbered.check(batch)
        finally:
            logging.getLogger("loaderd").removeHandler(handler)
        assert sorted(found) == list(range(NUM_RECORDS))
