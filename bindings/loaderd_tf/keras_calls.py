"""What Keras was asked to do with a data set.

Keras tells neither data sets nor callbacks what ``fit`` was given, so the frames of the callers are looked up.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

from loaderd.errors import OptionError

_MOST_FRAMES = 32


def argument_of_fit(name: str) -> Any:
    """The local variable ``name`` of the ``fit`` that calls; None also where its frame is not found.

    To be called only when ``fit`` begins: what reads a frame's variables may keep them alive, and later an iterator
    and its batches are among them.
    """
    frame = _frame_of("fit")
    return None if frame is None else frame.f_locals.get(name)


def check_has_target(fields: Sequence[str]) -> None:
    """Raise OptionError if Keras is about to compute a loss of elements that are a dict: inputs without a target."""
    frame = _frame_of("fit", "evaluate")
    if frame is None:
        return
    model = frame.f_locals.get("self")
    method = "train_step" if frame.f_code.co_name == "fit" else "test_step"
    step = getattr(type(model), method, None)
    # A model may have its own step, which takes the dict apart, or a loss of its own, which needs no target.
    if getattr(model, "loss", None) is not None and _is_of_keras(getattr(step, "__module__", None)):
        raise OptionError(
            f"structure must tell {frame.f_code.co_name} which fields are inputs and which are targets, got none or "
            "a dict: each element is then a dict of fields, all of which Keras takes for inputs",
            hint=f"Give make_dataset (or from_loader) structure=(inputs, targets), such as structure="
            f"({fields[0]!r}, {fields[-1]!r}).",
        )


def check_one_host() -> None:
    """Raise OptionError if Keras is about to iterate over the batches of one of several hosts."""
    frame = _frame_of("fit", "evaluate", "predict")
    if frame is not None:
        raise OptionError(
            f"Keras's {frame.f_code.co_name} does not train on several hosts: it supports no "
            "MultiWorkerMirroredStrategy with more than one worker",
            hint="Write the loop over the data set yourself: strategy.run(train_step, args=(batch,)) for each batch.",
        )


def _frame_of(*methods: str) -> FrameType | None:
    """The frame of the nearest call of one of these methods of a Keras model; None: there is none."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return None
        if frame.f_code.co_name in methods and _is_of_keras(frame.f_globals.get("__name__")):
            return frame
        frame = frame.f_back
    return None


def _is_of_keras(module: Any) -> bool:
    return isinstance(module, str) and module.partition(".")[0] in ("keras", "tf_keras")
