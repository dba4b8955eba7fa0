"""A consumer that takes as many batches as it is told. Arguments: the options of its connection as JSON.

A number on standard input is how many to take, of one pass after another. Of each batch it writes a line with its
number, the ids in it and the position behind it; of each end of a pass, a line; and in the end, as many as it was
told, an empty line.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import loaderd


def items_of(loader: loaderd.Loader) -> Iterator[dict[str, Any]]:
    while True:
        for batch in loader:
            yield {"ids": batch["id"].tolist(), "position": loader.position.to_json()}
        yield {"end": True}


options = json.loads(sys.argv[1])
start = options.pop("start", None)
position = None if start is None else loaderd.Position.from_json(start)
with loaderd.connect("unix:x.sock", dataset="train", start=position, **options) as loader:
    print(flush=True)
    items = items_of(loader)
    for line in sys.stdin:
        for _ in range(int(line)):
            item = next(items)
            print(json.dumps(item), flush=True)
            if "end" in item:
                break
        print(flush=True)
