"""The order of the layers, and what each imports."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import loaderd

ROOT = Path(__file__).parent.parent

# From the bottom to the top. A module imports from its own folder and from rows below; rooms in one row know nothing
# of each other.
LAYERS = [
    ["loaderd.redaction"],
    [
        "loaderd.errors",
        "loaderd.logs",
        "loaderd.machine",
        "loaderd.processes",
        "loaderd.restarts",
        "loaderd.snapshots",
        "loaderd.stages",
        "loaderd.version",
    ],
    ["loaderd.randomness", "loaderd.kernels", "loaderd.progress", "loaderd.user_modules"],
    ["loaderd.schema"],
    ["loaderd.schemas", "loaderd.options"],
    ["loaderd.storage"],
    ["loaderd.formats", "loaderd.decode", "loaderd.shm", "loaderd.plan"],
    ["loaderd.observe"],
    ["loaderd.ipc"],
    ["loaderd.dataset", "loaderd.convert"],
    ["loaderd.pickling", "loaderd.selfplay"],
    ["loaderd.remote"],
    ["loaderd.worker"],
    ["loaderd.daemon.pool"],
    ["loaderd.daemon.indexing"],
    ["loaderd.daemon.delivery"],
    ["loaderd.daemon"],
    ["loaderd.client"],
    ["loaderd.serve", "loaderd.testing"],
    ["loaderd"],
    ["loaderd_jax", "loaderd_ray", "loaderd_tf", "loaderd_torch", "loaderd.cli"],
    ["loaderd.__main__"],
]
# The bindings, and the libraries that nothing else imports.
BINDINGS = {
    "loaderd_jax": ["jax", "jaxlib"],
    "loaderd_ray": ["ray"],
    "loaderd_tf": ["tensorflow", "keras"],
    "loaderd_torch": ["torch"],
}
# What a binding may use beside the face of the package.
BELOW_THE_BINDING = ["loaderd.client", "loaderd.dataset", "loaderd.errors", "loaderd.options"]
BELOW = {
    **{binding: ["loaderd.schema"] for binding in ("loaderd_jax", "loaderd_tf", "loaderd_torch")},
    "loaderd_ray": [
        "loaderd.progress",
        "loaderd.redaction",
        "loaderd.restarts",
        "loaderd.formats",
        "loaderd.snapshots",
        "loaderd.storage",
    ],
}
# Each loader starts a daemon, so each of these would cost each loader milliseconds. What only some need (for shards
# that are far away, groups, a mix, a diagnosis) is imported in the function that needs it.
NOT_AT_THE_START = [
    *("argparse", "cloudpickle", "concurrent.futures", "crc32c", "csv", "decimal", "email", "fractions", "gzip"),
    *("importlib.metadata", "llvmlite", "prometheus_client", "pyarrow", "random", "secrets", "subprocess", "tarfile"),
    *("tempfile", "uuid", "zipfile", "loaderd.client", "loaderd.observe", "loaderd.remote"),
    *("loaderd.schemas", "loaderd.serve", "loaderd.ipc.subscription"),
    "loaderd.formats.npz",
]

# Nor is this part of `from loaderd import Loader`: it is for servers, for those who ask, or for workers alone.
NOT_IN_A_LOADER = [
    *("random", "zlib", "loaderd.observe", "loaderd.remote.source", "loaderd.ipc.subscription"),
    *("loaderd.kernels", "loaderd.storage.files", "loaderd.formats.reader"),
]


def room_of(module: str) -> str:
    rooms = [room for row in LAYERS for room in row if module == room or module.startswith(room + ".")]
    assert rooms, f"{module} is in no layer"
    return max(rooms, key=len)


def level_of(room: str) -> int:
    return next(level for level, row in enumerate(LAYERS) if room in row)


def modules() -> Iterator[tuple[str, Path]]:
    for folder in (ROOT / "loaderd", *(ROOT / "bindings" / name for name in BINDINGS)):
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder.parent).with_suffix("").parts
            yield ".".join(part for part in parts if part != "__init__"), path


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            module = node.module or ""
            found |= {f"{module}.{alias.name}" for alias in node.names} if module == "loaderd" else {module}
    return found


@pytest.mark.parametrize(("module", "path"), [pytest.param(*found, id=found[0]) for found in modules()])
def test_imports_point_down(module: str, path: Path):
    room = room_of(module)
    for imported in imports_of(path):
        if imported.split(".")[0] not in ("loaderd", *BINDINGS):
            continue
        other = room_of(imported)
        if room in BINDINGS:
            assert other in (room, "loaderd", *BELOW_THE_BINDING, *BELOW.get(room, ()))
        else:
            assert other == room or level_of(other) < level_of(room), f"{module} imports {imported}"


def test_every_room_is_in_the_docs():
    block = (ROOT / "docs" / "how-it-works.md").read_text().split("## The layers")[1].split("```")[1].split()
    named = {name.replace("loaderd/", "").removeprefix("loaderd_").lstrip("._") for name in block}
    rooms = {room.removeprefix("loaderd").lstrip("._").rpartition(".")[2] for row in LAYERS for room in row}
    assert rooms - named - {"", "main__"} == set()


@pytest.mark.one_variant
@pytest.mark.parametrize("binding", BINDINGS)
def test_only_the_binding_imports_its_library(binding: str):
    users = {
        module.split(".")[0]
        for module, path in modules()
        if {name.split(".")[0] for name in imports_of(path)} & {*BINDINGS[binding]}
    }
    assert users == {binding}


def modules_of(imports: str) -> list[str]:
    """What is imported by it in a new process."""
    program = f"import sys; before = set(sys.modules); {imports}; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_what_the_start_of_a_daemon_does_not_import():
    imported = modules_of("import loaderd.daemon.private_daemon")
    assert "loaderd.worker.worker" in imported, "workers are forks, and find what they need"
    assert [each for each in imported if each.startswith(tuple(NOT_AT_THE_START))] == []


def test_what_a_loader_does_not_import():
    imported = modules_of("import numpy; before |= set(sys.modules); from loaderd import Loader")
    assert "loaderd.client.loader" in imported
    assert [each for each in imported if each.startswith(tuple(NOT_IN_A_LOADER))] == []
    assert len([each for each in imported if each.split(".")[0] == "loaderd"]) <= 62, "each costs a start 0.2 ms"


def test_every_error_is_in_the_tree_that_is_drawn():
    drawn = loaderd.errors.__doc__ or ""
    for name, value in vars(loaderd.errors).items():
        if not isinstance(value, type) or not issubclass(value, Exception):
            continue
        assert name in drawn
        if issubclass(value, loaderd.errors.LoaderdError):
            error = loaderd.errors.from_wire(loaderd.errors.to_wire(value("it broke", hint="mend it")))
            assert type(error) is value and str(error) == "it broke\nmend it"
