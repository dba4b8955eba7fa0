"""Tests with the oldest or the newest versions that setup.cfg allows: ``make compat``.

    python3 tests/compat.py oldest python3.10
    python3 tests/compat.py newest python3.13

makes ``.venv-compat-oldest-3.10`` with every package of ``install_requires`` and of the extras below in the version
that stands behind its ``>=``, or with the newest that pip finds, and runs the tests of the core there, and those of
the binding for TensorFlow. So these bounds in setup.cfg are tested ones: raise one there, and run this again. The
environment is made anew when bounds have changed, and each run with the newest takes those that there are by then.
"""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
EXTRAS = ["tensorflow", "compiled", "console", "fast", "metrics", "server"]
TESTED_WITH = ["pytest", "pytest-timeout", "hypothesis"]
TESTS = [
    *("tests/kernels/test_bits.py", "tests/decode/test_example.py", "tests/kernels/test_crc.py"),
    *("tests/formats/test_compression.py", "tests/storage/test_local.py", "tests/test_randomness.py"),
    *("tests/storage/test_storage_threads.py", "tests/test_pickling.py"),
    *("tests/observe/test_exporter.py", "tests/cli/test_top.py"),
    *("tests/client/test_loader.py", "tests/remote/test_network.py"),
    *("tests/bindings/test_batches.py", "tests/bindings/test_iterators.py"),
]


def requirements() -> list[str]:
    """What setup.cfg asks for, of loaderd and of the extras."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = setup["options.extras_require"]
    text = "\n".join([setup["options"]["install_requires"], *(extras[name] for name in EXTRAS)])
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def interpreter(name: str) -> str:
    """``name``, a path or on the PATH; or among pyenv's versions. Exits if it is in neither."""
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    version = Path(name).name.removeprefix("python")
    found = [shutil.which(name), *map(str, versions.glob(f"{version}.*/bin/python{version}"))]
    for path in filter(None, found):
        if subprocess.run([path, "-c", "import ensurepip"], capture_output=True).returncode == 0:
            return path
    sys.exit(f"There is no {name} on the PATH or in {versions}.")


def main(which: str, python: str) -> None:
    folder = ROOT / f".venv-compat-{which}-{Path(python).name.removeprefix('python')}"
    wanted = [line.replace(">=", "==") if which == "oldest" else line for line in requirements()] + TESTED_WITH
    made = folder / "made"
    is_made = made.exists() and made.read_text().splitlines() == wanted
    if not is_made:
        subprocess.run([interpreter(python), "-m", "venv", "--clear", folder], check=True)
    if not is_made or which == "newest":
        pip = [folder / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--upgrade", *wanted], check=True)
        subprocess.run([*pip, "--no-deps", "--editable", ROOT], check=True)
        made.write_text("\n".join(wanted))
    subprocess.run([folder / "bin" / "pip", "list", "--disable-pip-version-check"], check=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    tests = [folder / "bin" / "python", "-m", "pytest", "-p", "no:cacheprovider", "-m", "", *TESTS]
    sys.exit(subprocess.run(tests, cwd=ROOT, env=environment).returncode)


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("oldest", "newest"):
        sys.exit(__doc__)
    main(*sys.argv[1:])
