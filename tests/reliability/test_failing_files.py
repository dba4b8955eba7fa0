"""Files of a network mount that fail for a while, and too many open files: nothing is lost, nothing is skipped."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.reliability.numbered import write_shards

# Reads of shards fail while the file $TROUBLE is there; what it holds is the number of the error.
_LIBRARY = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

static int trouble(int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 9 || memcmp(path + length - 9, ".tfrecord", 9)) return 0;
    FILE *file = fopen(getenv("TROUBLE"), "r");
    int number = 0;
    if (!file) return 0;
    if (fscanf(file, "%d", &number) != 1) number = 0;
    fclose(file);
    return number;
}

#define READER(name, offset_type)                                                             \
    ssize_t name(int fd, const struct iovec *parts, int count, offset_type offset) {          \
        int number = trouble(fd);                                                             \
        if (number) { errno = number; return -1; }                                            \
        ssize_t (*real)(int, const struct iovec *, int, offset_type) = dlsym(RTLD_NEXT, #name); \
        return real(fd, parts, count, offset);                                                \
    }
READER(preadv, off_t)
READER(preadv64, off64_t)

#define READER2(name, offset_type)                                                            \
    ssize_t name(int fd, const struct iovec *parts, int count, offset_type offset, int flags) { \
        int number = trouble(fd);                                                             \
        if (number) { errno = number; return -1; }                                            \
        ssize_t (*real)(int, const struct iovec *, int, offset_type, int) = dlsym(RTLD_NEXT, #name); \
        return real(fd, parts, count, offset, flags);                                         \
    }
READER2(preadv2, off_t)
READER2(preadv64v2, off64_t)
"""

_TRAINING = """
import os, sys, threading
import numpy as np
import loaderd
from loaderd.errors import StorageError
from numbered import SCHEMA, numbers_of

def heal():
    if os.path.exists(os.environ["TROUBLE"]):
        os.unlink(os.environ["TROUBLE"])

options = dict(batch_size=100, workers=2, shuffle=loaderd.Shuffle(window_records=1000, block_records=64))
with loaderd.Loader(sys.argv[1], SCHEMA, **options) as loader:
    planned = np.concatenate([numbers_of(batch) for batch in loader])
storage = loaderd.Storage(retry_s=float(sys.argv[3]))
errors = 0
with loaderd.Loader(sys.argv[1], SCHEMA, on_corrupt=sys.argv[2], storage=storage, **options) as loader:
    batches = iter(loader)
    found = [numbers_of(next(batches))]
    with open(os.environ["TROUBLE"], "w") as file:
        file.write(sys.argv[4])
    if storage.retry_s > 1:
        threading.Timer(2.0, heal).start()
    while True:
        try:
            found.append(numbers_of(next(batches)))
        except StorageError as error:
            assert os.strerror(int(sys.argv[4])) in str(error), error
            errors += 1
            heal()
        except StopIteration:
            break
    statistics = loader.statistics()
assert np.array_equal(np.concatenate(found), planned), "another order"
assert not statistics.damages and not statistics.records_skipped and not statistics.daemon_restarts
print(errors)
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler to make reads fail with")
    folder = tmp_path_factory.mktemp("library")
    (folder / "trouble.c").write_text(_LIBRARY)
    made = folder / "trouble.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", made, folder / "trouble.c", "-ldl"], check=True)
    return made


@pytest.mark.one_variant
@pytest.mark.parametrize(
    ("error", "retry_s", "on_corrupt"),
    [
        ("EIO", 60, "skip_record"),
        ("ESTALE", 60, "raise"),
        *(("EIO", 60, "raise"), ("ESTALE", 60, "skip_record")),
        *(("EIO", 0.5, on_corrupt) for on_corrupt in ("raise", "skip_record")),
    ],
)
def test_reads_that_fail_for_a_while_lose_nothing(
    tmp_path: Path, library: Path, on_corrupt: str, error: str, retry_s: float
):
    import errno

    write_shards(tmp_path / "shards", [3000, 3000, 2000])
    environment = {
        **os.environ,
        "LD_PRELOAD": str(library),
        "TROUBLE": str(tmp_path / "trouble"),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
    }
    arguments = [f"{tmp_path}/shards/*.tfrecord", on_corrupt, str(retry_s), str(getattr(errno, error))]
    done = subprocess.run(
        [sys.executable, "-c", _TRAINING, *arguments], env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert (int(done.stdout) > 0) == (retry_s < 1), "what passes in time is no error"


_WATCHED = """
import logging, os, sys, threading, time
import loaderd
from loaderd.errors import StorageError
from numbered import SCHEMA

class Heard(logging.Handler):
    def emit(self, record):
        messages.append(record.getMessage())

messages = []
logging.getLogger("loaderd").addHandler(Heard())
options = dict(batch_size=100, workers=2, shuffle=loaderd.Shuffle(window_records=1000, block_records=64), epochs=None)
with loaderd.Loader(sys.argv[1], SCHEMA, **options) as loader:
    batches = iter(loader)

    def take():
        while not is_over.is_set():
            next(batches)
            time.sleep(0.001)

    is_over, taker = threading.Event(), threading.Thread(target=take)
    next(batches)
    with open(os.environ["TROUBLE"], "w") as file:
        file.write("5")
    taker.start()
    while not messages or (found := loader.diagnose()).verdict != "storage does not answer":
        time.sleep(0.1)
    os.unlink(os.environ["TROUBLE"])
    while len(messages) < 2:
        time.sleep(0.1)
    is_over.set()
    taker.join()
assert found.gain == 1 and found.outage_s >= 3 and "Input/output" in found.last_error, found
assert "no answer from the storage for" in messages[0], messages
assert "answers come from the storage again, after" in messages[1], messages
"""


@pytest.mark.slow
def test_a_mount_that_fails_is_named_and_logged(tmp_path: Path, library: Path):
    write_shards(tmp_path / "shards", [3000, 3000, 2000])
    environment = {
        **os.environ,
        "LD_PRELOAD": str(library),
        "TROUBLE": str(tmp_path / "trouble"),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-c", _WATCHED, f"{tmp_path}/shards/*.tfrecord"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow  # with fewer files, and one consumer, in tests/test_machine.py
def test_few_files_may_be_open_and_eight_consumers_lose_nothing(tmp_path: Path):
    """Each consumer has a daemon and workers of its own, which may have 64 files open each, too."""
    write_shards(tmp_path / "shards", [40] * 100)
    script = textwrap.dedent("""
        import resource, sys
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        import numpy as np
        import loaderd
        from numbered import SCHEMA, numbers_of
        with loaderd.Loader(sys.argv[1], SCHEMA, batch_size=100, workers=2, epochs=2) as loader:
            found = np.concatenate([numbers_of(batch) for batch in loader])
            assert not loader.statistics().damages
        assert np.array_equal(np.sort(found), np.repeat(np.arange(4000), 2))
    """)
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    consumers = [
        subprocess.Popen(
            [sys.executable, "-c", script, f"{tmp_path}/shards/*.tfrecord"],
            env={**os.environ, "PYTHONPATH": paths},
            stderr=subprocess.PIPE,
        )
        for _ in range(8)
    ]
    said = [consumer.communicate(timeout=200)[1] for consumer in consumers]
    assert [consumer.returncode for consumer in consumers] == [0] * 8, said
