"""Compare loaderd with everything in ``candidates/``: ``python bench/compare.py [options] [SHARDS …]``."""

from __future__ import annotations

from loaderd.bench.compare import main

if __name__ == "__main__":
    main()
