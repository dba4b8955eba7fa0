"""Games of Leela Chess Zero, written by its own program with random moves; and tars, as its server makes them."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

WriteTar = Callable[[Path, Iterable[tuple[str, bytes]]], Path]


@pytest.fixture(scope="session")
def lc0_games(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three gzip files, a game each."""
    home = tmp_path_factory.mktemp("lc0")
    options = ["--backend=random", "--games=12", "--visits=20", "--parallelism=1", "--training=true"]
    subprocess.run(
        [Path(sys.executable).with_name("lc0"), "selfplay", *options],
        env={**os.environ, "HOME": str(home), "XDG_CACHE_HOME": str(home)},
        cwd=home,
        check=True,
        capture_output=True,
        timeout=50,
    )
    games = sorted(home.rglob("*.gz"))[:3]
    assert len(games) == 3, "now and then it writes no file of a game; but of ten?"
    return games


@pytest.fixture(scope="session")
def write_tar() -> WriteTar:
    def write(path: Path, members: Iterable[tuple[str, bytes]]) -> Path:
        with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
            for name, data in members:
                info = tarfile.TarInfo(name)
                info.size = len(data)
                if name.endswith("/"):
                    info.type = tarfile.DIRTYPE
                tar.addfile(info, io.BytesIO(data))
        return path

    return write
