"""How a program uses a loader when it ends: the first lines of a script; those of ``ends`` come behind.

Each leaves an endless iterator ``it``, of which the last lines may take batches; most leave things alive that a
program need not close. None of them imports TensorFlow.
"""

from __future__ import annotations

LOADERS = {
    "nothing": """
it = itertools.count()
""",
    "iterator": """
it = iter(loader())
for _ in range(20):
    next(it)
""",
    "iterator, not begun": """
it = iter(loader())
""",
    "batches held": """
it = iter(loader())
held = [next(it) for _ in range(7)]
views = [batch["id"] for batch in held]
""",
    "loop that was left": """
data = loader()
for batch in data:
    break
it = iter(data)
""",
    "with, inside": """
data = loader()
with loader() as left:
    for batch in left:
        break
it = iter(data)
next(it)
""",
    "closed": """
closed = loader()
old = iter(closed)
next(old)
closed.close()
it = itertools.count()
""",
    "pass that is over": """
data = loader(epochs=1)
assert sum(1 for _ in data) == NUM_BATCHES
it = itertools.chain(data, itertools.count())
next(it)
""",
    "several": """
loaders = [loader() for _ in range(3)]
iterators = [iter(one) for one in loaders]
it = map(next, itertools.cycle(iterators))  # no generator: that would be over when it is interrupted
for _ in range(10):
    next(it)
""",
    "two iterators of one": """
data = loader()
first, it = iter(data), iter(data)
for _ in range(3):
    next(first), next(it)
""",
    "dropped": """
for _ in range(3):
    it = iter(loader())
    next(it)
""",
    "class with __del__ that closes": """
class Reader:
    def __init__(self):
        self.loader = loader()
        self.it = iter(self.loader)

    def __del__(self):
        self.loader.close()

reader = Reader()
it = reader.it
next(it)
""",
    "class with __del__ that reads": """
class Reader:
    def __init__(self):
        self.it = iter(loader())

    def __del__(self):
        next(self.it, None)

reader = Reader()
it = iter(reader.it)
next(it)
""",
    "reference cycle": """
class Node:
    pass

node = Node()
node.loader = loader()
node.it = it = iter(node.loader)
node.node = node
next(it)
del node
""",
    "finalizer that closes": """
data = loader()
it = iter(data)
next(it)
finalizer = weakref.finalize(given, data.close)
""",
    "finalizer that reads": """
it = iter(loader())
next(it)
finalizer = weakref.finalize(given, next, it, None)
""",
    "atexit before": """
def goodbye():
    for batch in itertools.islice(it, 5):
        pass

atexit.register(goodbye)
it = iter(loader())
next(it)
""",
    "atexit after": """
it = iter(loader())
next(it)

@atexit.register
def goodbye():
    for batch in itertools.islice(it, 5):
        pass
""",
    "atexit that closes": """
data = loader()
it = iter(data)
next(it)
atexit.register(data.close)
""",
    "daemon thread": """
it = iter(loader())
begun = threading.Event()

def work():
    for batch in it:
        begun.set()

threading.Thread(target=work, daemon=True).start()
begun.wait()
""",
    "daemon threads, each its own": """
begun = threading.Barrier(3)

def work():
    mine = iter(loader())
    next(mine)
    begun.wait()
    for batch in mine:
        pass

for _ in range(2):
    threading.Thread(target=work, daemon=True).start()
begun.wait()
it = iter(loader())
""",
    "asyncio.to_thread": """
import asyncio

it = iter(loader())

async def main():
    for _ in range(5):
        await asyncio.to_thread(next, it)

asyncio.run(main())
""",
    "queue filled by a thread": """
import queue

batches = queue.Queue(maxsize=2)

def fill():
    for batch in loader():
        batches.put(batch)

threading.Thread(target=fill, daemon=True).start()
it = iter(batches.get, None)
next(it)
""",
    "mirrored in a generator": """
def numbers():
    with loader() as data:
        for batch in data:
            yield batch["id"]

it = numbers()
next(it)
""",
    "warning filter": """
import warnings

warnings.simplefilter("error")
it = iter(loader())
next(it)
""",
}

# Who asks for a batch in the main thread when the program has ended, is told so: it is no end of the data.
_TOO_LATE = r"Exception ignored in(.|\n)*Take what you need before that\.\n"
LOADER_PRINTS = {"class with __del__ that reads": _TOO_LATE, "atexit before": _TOO_LATE}
