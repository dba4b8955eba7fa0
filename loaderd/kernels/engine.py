"""What decodes one field: its face."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

AnyArray = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Indices = npt.NDArray[np.intp]


class Engine:
    """Decodes one field from rows. Not thread-safe: it owns scratch memory."""

    is_compiled = False
    writes_apart = False
    """Whether the records that it writes may lie apart from each other in ``out``."""

    @property
    def scratch_record_bytes(self) -> int:
        """Bytes of scratch memory for each record of a chunk."""
        return 0

    def reserve(self, max_records: int) -> None:
        """Allocate the scratch memory: from then on ``decode`` takes up to ``max_records`` records a call."""

    def check(self, rows: Bytes) -> None:
        """Raise WorkerError where ``decode`` would, without an ``out``; for what ``Schema.checked_fields`` has."""
        raise NotImplementedError

    def decode(self, rows: Bytes, out: AnyArray) -> None:
        """Write the field of ``rows``, uint8 (n, row_bytes), to ``out`` (n, *shape). Both must be C-contiguous.

        The row must have a byte behind a feature of packed bits, as ``Schema.row_dtype`` has it.
        """
        raise NotImplementedError
