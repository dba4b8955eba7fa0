"""What a stream tells its consumers besides batches: which batches it cannot make, and which records others lack."""

from __future__ import annotations

from collections.abc import Sequence

from loaderd.errors import HOW_TO_GO_ON_BEHIND, EmptyBatchError
from loaderd.ipc.messages import BatchFailed, RecordsSkipped
from loaderd.ipc.worker_messages import LoadFault

Note = BatchFailed | RecordsSkipped


def note_of(generation: int, step: int, num_rows: int, bad: Sequence[LoadFault], skip_damaged: bool) -> Note:
    """What to say of a batch of ``num_rows`` rows; ``bad``: the fault of each row that cannot be delivered."""
    errors = tuple({id(fault): fault.error for fault in bad}.values())
    if skip_damaged and len(bad) < num_rows:
        return RecordsSkipped(generation, step, errors, len(bad))
    first = errors[0]
    damages = tuple(damage for error in errors for damage in error.damages)
    message = first.message
    if len(bad) > 1:  # one value may cost all records of its block
        message += f" ({len(bad)} of the {num_rows} records of this batch cannot be delivered)"
    if skip_damaged:  # the loss of an empty batch would not be a number
        none_left = f"none of the {num_rows} records of batch {step} is left; the first: {message}"
        return BatchFailed(generation, step, EmptyBatchError(none_left, hint=HOW_TO_GO_ON_BEHIND, damages=damages))
    error = type(first)(message, hint=first.hint, damages=damages, traceback=first.traceback)
    return BatchFailed(generation, step, error)
