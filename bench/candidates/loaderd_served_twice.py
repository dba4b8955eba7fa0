"""loaderd's server on the same machine, two consumers, each with its own order; a step counts what both have got.

The second is a process of its own, and says in shared memory how far it is.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import numpy as np
from candidates._served import consume, served
from harness.interface import Config, Step


def steps(config: Config) -> Iterator[Step]:
    with served(config) as address, tempfile.NamedTemporaryFile() as shared:
        taken = np.memmap(shared.name, np.int64, shape=(1,))
        second = subprocess.Popen([sys.executable, "-m", "candidates.loaderd_served_twice", address, shared.name])
        try:
            while taken[0] == 0 and second.poll() is None:
                time.sleep(0.01)
            before = 0
            for step in consume(address):
                if second.poll():
                    raise RuntimeError(f"the second consumer ended with status {second.returncode}")
                now = int(taken[0])
                yield Step(step.examples + now - before, step.batch)
                before = now
        finally:
            second.terminate()
            second.wait()


def main() -> None:
    """The second consumer; its arguments are the address and the file of the counter."""
    taken = np.memmap(sys.argv[2], np.int64, shape=(1,))
    for step in consume(sys.argv[1]):
        next(iter((step.batch or {}).values())).item(0)
        taken[0] += step.examples


if __name__ == "__main__":
    main()
