"""How a program uses its data when it ends: the first lines of a script; those of ``ends`` come behind them.

Each leaves an endless iterator ``it``, of which the last lines may take batches; most leave things alive that a
program need not close.
"""

from __future__ import annotations

_DAEMON_THREAD = """
it = iter(make())
begun = threading.Event()

def work():
    for batch in it:
        begun.set()
    print("data without an end are over", file=sys.stderr)

thread = threading.Thread(target=work, daemon=True)
thread.start()
begun.wait()
"""

COMMON = {
    "iterator": """
it = iter(make())
for _ in range(50):
    next(it)
""",
    "iterator, not begun": """
it = iter(make())
""",
    "loop that was left": """
data = make()
for batch in data:
    break
it = iter(data)
""",
    "class with __del__ that reads": """
class Reader:
    def __init__(self):
        self.it = iter(make())

    def __del__(self):
        next(self.it, None)

reader = Reader()
it = reader.it
next(it)
""",
    "reference cycle": """
class Node:
    pass

node = Node()
node.data = make()
node.it = it = iter(node.data)
node.node = node
next(it)
del node
""",
    "atexit before": """
def goodbye():
    for batch in itertools.islice(it, 5):
        pass

atexit.register(goodbye)
it = iter(make())
next(it)
""",
    "atexit after": """
it = iter(make())
next(it)

@atexit.register
def goodbye():
    for batch in itertools.islice(it, 5):
        pass
""",
    "daemon thread": _DAEMON_THREAD,
}
"""``make`` is ``loader`` or ``data_set``."""

LOADERS = {
    **COMMON,
    "nothing": """
it = itertools.count()
""",
    "batches held": """
it = iter(loader())
held = [next(it) for _ in range(7)]
views = [batch["id"] for batch in held]
""",
    "packed batches": """
it = iter(loader(unpack="device"))
held = [next(it) for _ in range(7)]
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
    "atexit that closes": """
data = loader()
it = iter(data)
next(it)
atexit.register(data.close)
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
"""None of them imports TensorFlow."""

# Who asks for a batch in the main thread when the program has ended, is told so: it is no end of the data.
_TOO_LATE = r"Exception ignored in(.|\n)*Take what you need before that\.\n"
LOADER_PRINTS = {"class with __del__ that reads": _TOO_LATE, "atexit before": _TOO_LATE}

DATA_SETS = {
    **COMMON,
    "batches": """
it = iter(batches())
held = [next(it) for _ in range(7)]
flat = tf.reshape(held[3], [-1])
""",
    "batches, copied to a device": """
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
it = iter(batches(device="CPU:1"))
held = [next(it) for _ in range(20)][-1]
""",
    "iterator of one epoch": """
begun = iter(data_set(epochs=1))
next(begun)
it = itertools.count()
""",
    "data set dropped": """
it = iter(data_set())
next(it)
gc.collect()
""",
    "tf.function": """
it = iter(data_set())

@tf.function
def step():
    return tf.reduce_sum(next(it))

for _ in range(50):
    step()
""",
    "loop in a tf.function": """
ds = data_set()

@tf.function
def total(batches):
    sum = tf.constant(0, tf.int64)
    for ids in batches.take(20):
        sum += tf.reduce_sum(ids)
    return sum

total(ds)
it = iter(ds)
""",
    "prefetch": """
it = iter(data_set().prefetch(8))
for _ in range(50):
    next(it)
""",
    "shuffle": """
it = iter(data_set().shuffle(20))
for _ in range(50):
    next(it)
""",
    "map in parallel": """
it = iter(data_set().map(lambda ids: ids + 1, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE))
for _ in range(50):
    next(it)
""",
    "map of a Python function": """
def add(ids):
    return ids + 1

it = iter(data_set().map(lambda ids: tf.numpy_function(add, [ids], tf.int64)).prefetch(2))
for _ in range(50):
    next(it)
""",
    "cache": """
it = iter(data_set(epochs=1).cache().repeat())
for _ in range(70):
    next(it)
""",
    "interleave": """
ds = data_set()
it = iter(tf.data.Dataset.range(2).interleave(lambda _: ds, num_parallel_calls=2))
for _ in range(5):
    next(it)
""",
    "from_generator": """
def numbers():
    for ids in data_set():
        yield ids

it = iter(tf.data.Dataset.from_generator(numbers, output_signature=tf.TensorSpec([None], tf.int64)).prefetch(2))
for _ in range(20):
    next(it)
""",
    "loader closed": """
ds = data_set()
alive = iter(ds)
next(alive)
if given.SOURCE != "plain":
    ds.close()
it = itertools.count()
""",
    "several": """
sets = [data_set(), data_set(epochs=1), data_set()]
iterators = [iter(ds) for ds in sets]
for one in iterators:
    next(one)
it = iterators[0]
data = loader()
other = iter(data)
next(other)
""",
    "fit finished": """
model = net()
model.fit(pairs(epochs=1), epochs=2, verbose=0, shuffle=False)
it = itertools.count()
""",
    "fit left by an exception": """
model = net()

class Leave(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 20:
            raise RuntimeError("enough")

ds = pairs()
try:
    model.fit(ds, steps_per_epoch=100, verbose=0, shuffle=False, callbacks=[Leave()])
except RuntimeError:
    pass
it = itertools.count()
""",
    "fit left by Ctrl-C": """
model = net()

class Interrupt(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 20:
            os.kill(os.getpid(), signal.SIGINT)

ds = pairs()
try:
    model.fit(ds, steps_per_epoch=1000, verbose=0, shuffle=False, callbacks=[Interrupt()])
except KeyboardInterrupt:
    pass
it = itertools.count()
""",
    "fit in a thread": """
model = net()
ds = pairs()
begun = threading.Event()

class Begun(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        begun.set()

work = lambda: model.fit(ds, steps_per_epoch=100000, verbose=0, shuffle=False, callbacks=[Begun()])
threading.Thread(target=work, daemon=True).start()
begun.wait()
it = itertools.count()
""",
    "daemon thread that gets no core": _DAEMON_THREAD
    + """
import subprocess

busy = "import time; end = time.time() + 1.2; exec('while time.time() < end: pass')"
for core in range(2 * os.cpu_count()):
    subprocess.Popen([sys.executable, "-S", "-c", busy], env={}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
time.sleep(0.2)
os.setpriority(os.PRIO_PROCESS, thread.native_id, 19)
""",
    "two replicas": """
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
it = iter(strategy.experimental_distribute_dataset(data_set()))

@tf.function
def step(ids):
    return strategy.run(tf.reduce_sum, args=(ids,))

for _ in range(5):
    step(next(it))
""",
}

# Lines that TensorFlow prints in the same programs without loaderd; and what Keras says of data that end.
_OWN_LOG = r"WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR\n"
TENSORFLOW_PRINTS = {
    "from_generator": rf"(?:{_OWN_LOG})?W.*Error occurred when finalizing GeneratorDataset iterator.*\n.*PyFunc.*\n",
    "fit in a thread": r".*UserWarning: Your input ran out of data.*\n.*\n",
    "two replicas": rf"(?:{_OWN_LOG})?W.*GeneratorDatasetOp::Dataset will not be optimized.*\n",
}
# Of any iterator, by timing: one that is dropped while TensorFlow tunes it.
BY_TIMING = rf"(?:{_OWN_LOG})?W.*Optimization loop failed: CANCELLED.*\n"
