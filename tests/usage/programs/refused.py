"""What cannot work is an error at once that says what to do instead. They have no twin in memory."""

import json
import multiprocessing
import os
import socket

import keras
import loaderd_tf
import tensorflow as tf
from usage import NUMBERED, make, schema

forking = multiprocessing.get_context("fork")


def cluster_of(**tasks):
    """Servers of TensorFlow in processes of their own, which end with this one."""
    bound = [socket.create_server(("localhost", 0)) for _ in range(sum(tasks.values()))]
    addresses = iter(f"localhost:{each.getsockname()[1]}" for each in bound)
    cluster = tf.train.ClusterSpec({job: [next(addresses) for _ in range(count)] for job, count in tasks.items()})
    for each in bound:
        each.close()

    def serve(job, index):
        tf.distribute.Server(cluster, job, index, protocol="grpc").join()

    for job in ("ps", "worker"):
        for index in range(tasks[job]):
            forking.Process(target=serve, args=(job, index), daemon=True).start()
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        cluster, rpc_layer="grpc", task_type="chief", task_id=0
    )


def data_service():
    """Where a tf.data service is, with a worker in a process of its own, which ends with this one."""
    here, there = forking.Pipe()

    def serve():
        dispatcher = tf.data.experimental.service.DispatchServer()
        config = tf.data.experimental.service.WorkerConfig(dispatcher_address=dispatcher.target.split("://")[1])
        worker = tf.data.experimental.service.WorkerServer(config)
        there.send(dispatcher.target)
        worker.join()

    forking.Process(target=serve, daemon=True).start()
    return here.recv()


# %% data_service: guide "data", tf.data service, with a worker in a process of its own
# says: run `loaderd serve` and give each consumer loaderd_tf.from_loader(loaderd.connect(…))
service = data_service()
list(make().apply(tf.data.experimental.service.distribute("parallel_epochs", service)))

# %% growing_data_service: the same, of data that grow
# says: run `loaderd serve` and give each consumer loaderd_tf.from_loader(loaderd.connect(…))
service = data_service()
list(make(refresh="epoch").apply(tf.data.experimental.service.distribute("parallel_epochs", service)))

# %% parameter_server: guide "parameter_server_training", with loaderd_tf.distribute
# says: OptionError: strategy must feed its replicas from their own process, got a ParameterServerStrategy
strategy = tf.distribute.ParameterServerStrategy(cluster_of(chief=1, ps=1, worker=1))
loaderd_tf.distribute(strategy, NUMBERED, schema, global_batch_size=32)

# %% per_worker_dataset: guide "parameter_server_training", with a ClusterCoordinator
# says: use loaderd_tf.distribute with a MultiWorkerMirroredStrategy
strategy = tf.distribute.ParameterServerStrategy(cluster_of(chief=1, ps=1, worker=1))
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
iterator = iter(coordinator.create_per_worker_dataset(lambda: make()))
step = tf.function(lambda iterator: tf.reduce_sum(next(iterator)[0]))
print(coordinator.schedule(step, args=(iterator,)).fetch())

# %% wrong_field: a field that the schema lacks
# says: OptionError: structure must be made of the fields ['bits', 'target', 'weight', 'id'], got 'label'
make(("bits", "label"))

# %% fit_without_structure: guide "training_with_built_in_methods", with the elements of make_dataset's default
# says: OptionError: structure must tell fit which fields are inputs and which are targets
net = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(1)])
net.compile("adam", "mse")
net.fit(make(None))

# %% evaluate_without_structure: the same
# says: OptionError: structure must tell evaluate which fields are inputs and which are targets
net = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(1)])
net.compile("adam", "mse")
net.evaluate(make(None))

# %% fit_on_several_hosts: guide "multi_worker_with_keras": Keras 3 cannot, whatever the data are
# says: OptionError: Keras's fit does not train on several hosts
# alone: a cluster of two processes
bound = [socket.create_server(("localhost", 0)) for _ in range(2)]
addresses = [f"localhost:{each.getsockname()[1]}" for each in bound]
for each in bound:
    each.close()


def train(index):
    cluster = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
    os.environ["TF_CONFIG"] = json.dumps(cluster)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    batches = loaderd_tf.distribute(strategy, NUMBERED, schema, global_batch_size=32, structure=("bits", "target"))
    with strategy.scope():
        net = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(1)])
        net.compile("adam", "mse")
    net.fit(batches)


forking.Process(target=train, args=(1,), daemon=True).start()
train(0)

# %% no_such_device: a device that TensorFlow doesn't have here
# says: OptionError: device must be one of ['/device:CPU:0'], got '/GPU:0'
make(device="/GPU:0")

# %% random_access: tf.data.experimental.at
# says: has infinite cardinality, which does not support random access
tf.data.experimental.at(make(), 3)

# %% validation_split: Keras takes it for arrays only
# says: only supported for
net = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(1)])
net.compile("adam", "mse")
net.fit(make(), validation_split=0.2, verbose=0)
