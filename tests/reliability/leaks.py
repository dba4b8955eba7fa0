"""The leak test: trainings that end in every way, at every moment; 2 s later nothing of them may be left.

::

    python -m tests.reliability.leaks [--kills 200] [--others 80] [--limit-s 3600] [--seed 0]

Each is a real process with a loader in a loop (a tenth of them with TensorFlow). It says what it is at (starting,
opening, indexing, epoch, closing), and is killed some moment into that; or it ends itself, in one of ``ENDS``. What
belongs to it is found by a mark in the environment. Prints counts as a line of JSON; the exit status is 1 if anything
was left, if a training ended in another way than it was to, or if none was seen with processes of a loader.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.reliability.numbered import write_shards
from tests.reliability.processes import MARK, marked, name_of, shm_names

LIMIT_S = 2.0
_TRAINING_LIMIT_S = 120.0

_TRAINING = """
import os, signal, sys, time

signal.signal(signal.SIGINT, signal.default_int_handler)  # who is started in the background ignores it

def say(phase):
    os.write(int(sys.argv[1]), phase.encode() + b"\\n")

say("starting")
def hook(kind, error, traceback):
    # What a training is to end with may not be printed, so that whatever is printed is wrong.
    if kind is not KeyboardInterrupt and str(error) != "in the loop":
        sys.__excepthook__(kind, error, traceback)

sys.excepthook = hook
sys.path.insert(0, sys.argv[2])
end, with_tensorflow, index_cache, shards = sys.argv[3], sys.argv[4] == "1", sys.argv[5], sys.argv[6:]
import loaderd
from numbered import SCHEMA
if with_tensorflow:
    import loaderd_tf

def fork(act):
    child = os.fork()
    if child == 0:
        act()
    os.waitpid(child, 0)

def act(loader, step):
    if end == "os._exit":
        os._exit(3)
    elif end == "exception":
        raise RuntimeError("in the loop")
    elif end == "sys.exit":
        sys.exit(4)
    elif end == "del loader":
        return True
    elif end == "fork that exits":
        fork(lambda: os._exit(0))
    elif end == "fork that ends":
        fork(sys.exit)
    return step >= 40 and end.startswith("fork")

options = dict(
    batch_size=100, epochs=None, shuffle=loaderd.Shuffle(window_records=20_000), workers=2, index_cache=index_cache
)
while True:
    say("opening")
    if with_tensorflow:
        loader = None
        batches = loaderd_tf.make_dataset(shards, SCHEMA, **options)
    else:
        loader = loaderd.Loader(shards, SCHEMA, **options)
        batches = loader
    say("epoch")
    for step, batch in enumerate(batches):
        if step >= 20 and act(loader, step):
            break
        if step == 200:
            break
    say("closing")
    del batch, batches
    if end == "del loader":
        del loader
        say("deleted")
        time.sleep(60)
    elif end.startswith("fork"):
        sys.exit()
    elif loader is not None:
        loader.close()
"""

PHASES = ("starting", "opening", "epoch", "closing")
ENDS = {
    "os._exit": 3,
    "exception": 1,
    "sys.exit": 4,
    "del loader": None,
    "fork that exits": 0,
    "fork that ends": 0,
    "Ctrl-C": -signal.SIGINT,
    "Ctrl-C twice": -signal.SIGINT,
}
"""With the exit status of each; None: it lives on."""


@dataclass
class Figures:
    """Trainings by how they ended; what they left, what was printed, and what else was wrong, must be empty."""

    ended: Counter[str] = field(default_factory=Counter)
    with_tensorflow: int = 0
    most_processes: int = 0
    longest_s: float = 0.0
    left: list[str] = field(default_factory=list)
    printed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        return not (self.left or self.printed or self.wrong)


class Training:
    """One training process, in a process group of its own, as a shell would start it."""

    def __init__(self, folder: Path, shards: list[str], end: str, tensorflow: bool, index_cache: str) -> None:
        self.mark = uuid.uuid4().hex
        self.temp = folder / f"temp-{self.mark}"
        self.temp.mkdir()
        self.output = folder / f"output-{self.mark}"
        self._phases, theirs = os.pipe()
        quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0"}
        environment = {**os.environ, **quiet, MARK: self.mark, "TMPDIR": str(self.temp)}
        arguments = [str(theirs), str(Path(__file__).parent), end, str(int(tensorflow)), index_cache, *shards]
        with open(self.output, "wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _TRAINING, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                pass_fds=[theirs],
                process_group=0,
            )
        os.close(theirs)

    def wait_for(self, phase: str, figures: Figures) -> None:
        """Until it says that it is at ``phase``, or ends, which is wrong; raises TimeoutError."""
        said = b""
        until_s = time.monotonic() + _TRAINING_LIMIT_S
        while phase.encode() not in said.split(b"\n")[:-1]:
            if not select.select([self._phases], [], [], max(0.0, until_s - time.monotonic()))[0]:
                raise TimeoutError(f"it did not come to {phase!r}: {self.output.read_text()}")
            data = os.read(self._phases, 4096)
            if not data:
                figures.wrong.append(f"it ended before {phase!r}")
                return
            said += data

    def check(self, figures: Figures, end: str, status: int | None) -> None:
        """It has ended with that status, or lives on; within two seconds nothing else may be left of it."""
        if (found := self.process.poll()) != status:
            figures.wrong.append(f"status {found}, not {status}, after {end}")
        but = self.process.pid if status is None else None
        began_s = time.monotonic()
        while (left := [pid for pid in marked(self.mark) if pid != but]) and time.monotonic() - began_s < LIMIT_S:
            time.sleep(0.01)
        figures.longest_s = max(figures.longest_s, time.monotonic() - began_s)
        figures.left += [f"process {pid} ({name_of(pid)})" for pid in left]
        figures.left += [str(path) for path in self.temp.rglob("*")]

    def close(self, figures: Figures) -> None:
        """Whatever is left is ended now, so that one leak does not become many."""
        for pid in marked(self.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        os.close(self._phases)
        if printed := self.output.read_text():
            figures.printed.append(printed)


def kill(training: Training, figures: Figures, phase: str, delay_s: float) -> None:
    """SIGKILL, some moment after it came to ``phase``."""
    training.wait_for(phase, figures)
    time.sleep(delay_s)
    processes = marked(training.mark)
    figures.most_processes = max(figures.most_processes, len(processes))
    figures.left += shm_names(processes)  # nobody would clear it up
    training.process.kill()
    training.process.wait()
    training.check(figures, f"SIGKILL {phase}", -signal.SIGKILL)


def let_end(training: Training, figures: Figures, end: str, rng: random.Random) -> None:
    """It ends itself, or is interrupted; or it goes on without the loader."""
    if end == "del loader":
        training.wait_for("deleted", figures)
    elif end.startswith("Ctrl-C"):
        training.wait_for(rng.choice(["opening", "epoch"]), figures)
        time.sleep(rng.uniform(0, 0.3))
        os.killpg(training.process.pid, signal.SIGINT)
        if end == "Ctrl-C twice":
            time.sleep(rng.uniform(0, 0.05))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(training.process.pid, signal.SIGINT)
    if ENDS[end] is not None:
        try:
            training.process.wait(_TRAINING_LIMIT_S)
        except subprocess.TimeoutExpired:
            figures.left.append(f"the training itself, after {end}")
    training.check(figures, end, ENDS[end])


def look_for_leaks(
    folder: Path, num_kills: int, num_others: int, seed: int, tensorflow_share: float, limit_s: float = math.inf
) -> Figures:
    """``num_kills`` trainings are killed, in each phase by turns; ``num_others`` end in ``ENDS`` by turns.

    Fewer of them if the time is over.
    """
    rng = random.Random(seed)
    shards = write_shards(folder / "shards", [60_000, 20_000, 40_000])
    figures = Figures()
    ways = [("SIGKILL", PHASES[number % len(PHASES)]) for number in range(num_kills)]
    ways += [(list(ENDS)[number % len(ENDS)], "") for number in range(num_others)]
    rng.shuffle(ways)
    until_s = time.monotonic() + limit_s
    for end, phase in ways:
        if time.monotonic() > until_s:
            break
        # A fork of TensorFlow that ends as Python does hangs, whoever made the data set: its threads are missing.
        tensorflow = rng.random() < tensorflow_share and end != "fork that ends"
        # Without a cache, opening is indexing.
        training = Training(folder, shards, end, tensorflow, rng.choice(["none", str(folder / "index")]))
        figures.with_tensorflow += tensorflow
        figures.ended[f"{end} {phase}".strip()] += 1
        try:
            if end == "SIGKILL":
                kill(training, figures, phase, rng.uniform(0, {"epoch": 0.5, "closing": 0.05}.get(phase, 1.0)))
            else:
                let_end(training, figures, end, rng)
        finally:
            training.close(figures)
    figures.left += [str(path) for path in (folder / "index").rglob("*.tmp")]
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--others", type=int, default=80)
    parser.add_argument("--tensorflow-share", type=float, default=0.1)
    parser.add_argument("--limit-s", type=float, default=math.inf)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = look_for_leaks(
            Path(folder), args.kills, args.others, args.seed, args.tensorflow_share, args.limit_s
        )
    print(json.dumps(vars(figures)))
    was_killed = any(end.startswith("SIGKILL") for end in figures.ended)
    return 0 if figures.is_clean and (figures.most_processes >= 2 or not was_killed) else 1


if __name__ == "__main__":
    sys.exit(main())
