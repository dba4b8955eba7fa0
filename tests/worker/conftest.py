"""Scenes of workers at a page."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.worker.page_scene import NewScene, Scene


@pytest.fixture
def new_scene() -> Iterator[NewScene]:
    """Makes scenes, and closes them."""
    scenes: list[Scene] = []

    def make(*args: int) -> Scene:
        while scenes:  # a test makes hundreds
            scenes.pop().close()
        scenes.append(Scene(*args))
        return scenes[-1]

    yield make
    while scenes:
        scenes.pop().close()
