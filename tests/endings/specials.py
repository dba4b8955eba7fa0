"""Programs that end in a way of their own, each whole: threads that are joined, forks, other children, slow data."""

from __future__ import annotations

import os
import signal

from tests.endings.ending import PRELUDE, TENSORFLOW, Case
from tests.endings.ends import TRACEBACK, End

_THREAD_OF_ALL = """
def work():
    for number, batch in enumerate(loader(epochs=1)):
        time.sleep(0.01)
    print(number + 1)
    last_line()

threading.Thread(target=work).start()
"""
# Of programs that do a thing again and again.
ROUNDS = int(os.environ.get("ROUNDS", "3"))
_IN_MAIN = "if __name__ == '__main__':\n"


def _case(name: str, lines: str, end: End, tensorflow: bool = False, lives_on_s: float = 1.0) -> Case:
    script = PRELUDE + TENSORFLOW * tensorflow + lines.strip("\n") + "\n"
    return Case(name, script, end, tensorflow, lives_on_s=lives_on_s)


SPECIALS = [
    # ------------------------------------------------------------------------------------------ threads
    _case("a thread gets all its batches", _THREAD_OF_ALL, End("", stdout="50\n")),
    _case(
        "a thread gets all its batches, after an exception",
        _THREAD_OF_ALL + "raise ValueError('mine')",
        End("", 1, "50\n", TRACEBACK + "ValueError: mine\n"),
    ),
    _case("a thread gets all its batches, after sys.exit", _THREAD_OF_ALL + "sys.exit(3)", End("", 3, "50\n")),
    _case(
        "a thread of tf.data gets all its batches",
        """
def work():
    for number, ids in enumerate(data_set(epochs=1)):
        time.sleep(0.01)
    print(number + 1)
    last_line()

threading.Thread(target=work).start()
""",
        End("", stdout="50\n"),
        tensorflow=True,
    ),
    _case(
        "a job of a pool gets all its batches",
        """
from concurrent.futures import ThreadPoolExecutor

def work():
    print(sum(1 for batch in loader(epochs=1)))
    last_line()

ThreadPoolExecutor().submit(work)
""",
        End("", stdout="50\n"),
    ),
    # --------------------------------------------------------------------------------- again and again
    _case(
        "many loaders leave nothing",
        """
def sizes():
    tasks = len(os.listdir("/proc/self/task"))
    children = open(f"/proc/self/task/{os.getpid()}/children").read().split()
    return tasks, len(os.listdir("/proc/self/fd")), len(children)

def use():
    for batch in loader():
        break

use()
gc.collect()
before = sizes()
for _ in range(ROUNDS):
    use()
gc.collect()
print(before == sizes() or (before, sizes()))
last_line()
""".replace("ROUNDS", str(ROUNDS)),
        End("", stdout="True\n"),
    ),
    _case(
        "many data sets leave nothing",
        """
def sizes():
    children = open(f"/proc/self/task/{os.getpid()}/children").read().split()
    return len(os.listdir("/proc/self/fd")), len(children)

def use():
    it = iter(data_set())
    next(it)

for _ in range(2):
    use()
gc.collect()
before, tasks = sizes(), len(os.listdir("/proc/self/task"))
for _ in range(ROUNDS):
    use()
gc.collect()
# TensorFlow's own threads may be one more or less.
print((before == sizes() and len(os.listdir("/proc/self/task")) < tasks + 10) or (before, sizes()))
last_line()
""".replace("ROUNDS", str(ROUNDS)),
        End("", stdout="True\n"),
        tensorflow=True,
    ),
    # ------------------------------------------------------------------------------------------ children
    *(
        _case(
            f"a fork inherits a loader and {what}",
            f"""
it = iter(loader())
next(it)
child = os.fork()
if child == 0:
    {lines}
else:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == {status}
    for _ in range(60):
        next(it)
    last_line()
""",
            End("", stderr=stderr),
        )
        for what, lines, status, stderr in (
            ("ends", "pass", 0, ""),
            ("exits", "sys.exit(3)", 3, ""),
            ("exits at once", "os._exit(4)", 4, ""),
            ("is ended by a signal", "os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, ""),
            ("raises", "raise ValueError('mine')", 1, TRACEBACK + "ValueError: mine\n"),
        )
    ),
    _case(
        "a fork inherits a loader, and makes its own",
        """
it = iter(loader())
next(it)
child = os.fork()
if child == 0:
    own = iter(loader())
    next(own)
    sys.exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
next(it)
last_line()
""",
        End(""),
    ),
    _case(
        "a fork outlives its parent",
        """
it = iter(loader())
next(it)
if os.fork() == 0:
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    while os.getppid() != 1:
        time.sleep(0.01)
    own = iter(loader())
    next(own)
    os._exit(0)
last_line()
""",
        End(""),
        lives_on_s=20.0,
    ),
    *(
        _case(
            f"multiprocessing, {method}: {what}",
            f"""
import multiprocessing

def work(number):
    it = iter(loader())
    for _ in range(3):
        next(it)
    print(number, flush=True)

{_IN_MAIN}
    {before}
    children = [multiprocessing.get_context("{method}").Process(target=work, args=[number]) for number in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join()
        assert child.exitcode == 0
    it = iter(loader())
    next(it)
    last_line()
""",
            End("", stdout="0\n1\n|1\n0\n"),
        )
        for method in ("fork", "spawn", "forkserver")
        for what, before in (
            ("loaders of their own", "pass"),
            ("loaders of their own beside their parent's", "own = iter(loader()); next(own)"),
        )
    ),
    _case(
        "SIGCHLD is ignored",
        """
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
it = iter(loader())
next(it)
last_line()
""",
        End(""),
    ),
    _case(
        "no more files can be opened",
        """
import resource
it = iter(loader())
next(it)
last_line()
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
held = []
try:
    while True:
        held.append(os.dup(0))
except OSError:
    pass
""",
        End(""),
    ),
    _case(
        "a pool of processes",
        f"""
from concurrent.futures import ProcessPoolExecutor

def work(number):
    for batch in loader():
        return number

{_IN_MAIN}
    it = iter(loader())
    next(it)
    with ProcessPoolExecutor(2) as pool:
        assert list(pool.map(work, range(4))) == [0, 1, 2, 3]
    last_line()
""",
        End(""),
    ),
    _case(
        "a fork of a program with a tf.data iterator",
        """
import multiprocessing

it = iter(data_set())
next(it)
child = multiprocessing.get_context("fork").Process(target=print, args=["child"])
child.start()
child.join()
next(it)
last_line()
""",
        End("", stdout="child\n"),
        tensorflow=True,
    ),
    # ----------------------------------------------------------------------- while nothing is there yet
    *(
        _case(
            f"slow data, {how}, {what}",
            f"""
import slow

it = iter({how}(records=slow.train))
begun = threading.Event()

def work():
    begun.set()
    for batch in it:
        pass

{start}
time.sleep(0.3)
last_line()
{last}
""",
            End("", status, stderr=stderr),
            tensorflow=how == "data_set",
        )
        for how in ("loader", "data_set")
        for what, start, last, status, stderr in (
            ("a daemon thread waits", "threading.Thread(target=work, daemon=True).start()", "", 0, ""),
            (
                "SIGTERM",
                "threading.Timer(0.5, lambda: (last_line(), os.kill(os.getpid(), signal.SIGTERM))).start()",
                "work()",
                -signal.SIGTERM,
                "",
            ),
        )
    ),
    _case(
        "slow data, Ctrl-C",
        """
import slow

it = iter(loader(records=slow.train))
threading.Timer(0.5, lambda: (last_line(), os.kill(os.getpid(), signal.SIGINT))).start()
next(it)
""",
        End("", -signal.SIGINT, stderr=TRACEBACK + "KeyboardInterrupt\n\n?"),
    ),
    _case(
        "slow data, TensorFlow reads ahead",
        """
import slow

it = iter(data_set(records=slow.train).prefetch(2))
time.sleep(0.3)
last_line()
""",
        End(""),
        tensorflow=True,
    ),
]
