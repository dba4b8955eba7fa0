"""A bucket on this machine that answers late: shards in a server of S3, behind a proxy that holds each request back.

::

    python bench/slow_bucket.py 'shards/*.tfrecord' --delay-ms 50

Prints the URI of the shards, and serves them until its standard input ends.
"""

from __future__ import annotations

import argparse
import glob
import os
import socket
import sys
import threading
import time
from pathlib import Path

QUERY = "scheme=http&region=us-east-1"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "someone",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_EC2_METADATA_DISABLED": "true",
}


def forward(source: socket.socket, target: socket.socket, delay_s: float) -> None:
    """Until the source ends. What comes within a delay goes on together."""
    try:
        while data := source.recv(1 << 20):
            time.sleep(delay_s)
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:  # the other end is gone
        pass


def serve(listener: socket.socket, address: tuple[str, int], delay_s: float) -> None:
    """Connect whoever comes to ``address``; what they send gets there late."""
    while True:
        client, _ = listener.accept()
        server = socket.create_connection(address)
        for source, target, late_s in ((client, server, delay_s), (server, client, 0.0)):
            threading.Thread(target=forward, args=(source, target, late_s), daemon=True).start()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", help="a glob")
    parser.add_argument("--delay-ms", type=float, default=50)
    args = parser.parse_args()
    os.environ.update(CREDENTIALS)
    from moto.server import ThreadedMotoServer
    from pyarrow import fs

    moto = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    bucket, _ = fs.FileSystem.from_uri(
        f"s3://shards?endpoint_override={host}:{port}&{QUERY}&allow_bucket_creation=true"
    )
    bucket.create_dir("shards")
    for path in sorted(glob.glob(args.shards)):
        with bucket.open_output_stream(f"shards/{os.path.basename(path)}") as stream:
            stream.write(Path(path).read_bytes())
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=serve, args=(listener, (host, port), args.delay_ms / 1000), daemon=True).start()
    late = listener.getsockname()[1]
    query = f"endpoint_override=127.0.0.1:{late}&{QUERY}"
    print(f"s3://shards/*.tfrecord?{query}", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
