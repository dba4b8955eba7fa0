"""A consumer of its own process: ``reader.py ADDRESSES OPTIONS`` prints the ids of each batch, as a line of JSON.

Both are JSON, as ``loaderd.connect`` takes them. At the end it prints how often its own daemon had to be replaced.
"""

import json
import sys

import loaderd

if __name__ == "__main__":
    with loaderd.connect(json.loads(sys.argv[1]), **json.loads(sys.argv[2])) as loader:
        for batch in loader:
            print(json.dumps(batch["id"].tolist()), flush=True)
        print(json.dumps({"daemons replaced": loader.statistics().daemon_restarts}), flush=True)
