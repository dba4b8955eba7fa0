"""Games of Leela Chess Zero, for these tests."""

from tests.helpers.lc0_files import lc0_games, write_tar  # noqa: F401  (fixtures)
