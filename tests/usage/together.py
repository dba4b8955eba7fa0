"""Runs programs one after another in one process. What each reports, prints and comes to lies in its folder.

To start a process of TensorFlow and to end it costs more than most of the programs do. That each is right in a
process of its own too, up to its end, is for `make torture`.
"""

import builtins
import gc
import os
import sys
import traceback
import types
from pathlib import Path

import usage

OURS = sys.modules["__main__"]


def print_to(stdout: int, stderr: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)


def run(program: Path) -> None:
    """As ``__main__``, in its folder; then nothing of it is left but what it wrote there."""
    os.chdir(program.parent)
    os.environ["USAGE_REPORT"] = str(program.parent / "report")
    pipes = [os.dup(1), os.dup(2)]
    files = [os.open(program.parent / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND) for name in ("stdout", "stderr")]
    print_to(*files)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__.update(__file__=str(program), __builtins__=builtins)
    status = 0
    try:
        exec(compile(program.read_text(), program, "exec"), main.__dict__)
    except Exception:
        traceback.print_exc()
        status = 1
    sys.modules["__main__"] = OURS
    main.__dict__.clear()
    gc.collect()
    usage.close_loaders()
    print_to(*pipes)
    for descriptor in (*pipes, *files):
        os.close(descriptor)
    (program.parent / "status").write_text(str(status))


for path in sys.argv[1:]:
    run(Path(path))
if usage.SOURCE == "memory":
    # How a program ends with its batches in memory says nothing of loaderd.
    os._exit(0)
