"""What TensorFlow makes of a shard."""

from __future__ import annotations

import multiprocessing
import multiprocessing.process
from pathlib import Path
from typing import Any


class TensorFlowsReader:
    """``tf.data.TFRecordDataset`` in a process of its own: of a length of almost 2**64 with the right CRC, it dies.

    That process is forked off one that has imported TensorFlow and done nothing with it, which takes no time.
    """

    def __init__(self) -> None:
        import tensorflow as tf

        self._tf = tf
        self._context = multiprocessing.get_context("fork")
        self._child: multiprocessing.process.BaseProcess | None = None

    def read(self, path: Path) -> tuple[list[bytes], str]:
        """What a plain shard gives, and how that ends: ``"end"``, ``"error"`` or ``"death"`` of the process."""
        if self._child is None:
            self._pipe, theirs = self._context.Pipe()
            self._child = self._context.Process(target=self._serve, args=(theirs,), daemon=True)
            self._child.start()
            theirs.close()
        self._pipe.send(str(path))
        try:
            return self._pipe.recv()
        except EOFError:
            self._child.join()
            self._child = None
            return [], "death"

    def _serve(self, pipe: Any) -> None:
        while True:
            found: list[bytes] = []
            try:
                for record in self._tf.data.TFRecordDataset(pipe.recv()):
                    found.append(record.numpy())
            except self._tf.errors.OpError:
                pipe.send((found, "error"))
            except EOFError:
                return
            else:
                pipe.send((found, "end"))
