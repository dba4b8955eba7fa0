"""What would be installed is all there is, and the version stands in one place. (make package installs it.)"""

from __future__ import annotations

import configparser
import importlib.metadata
import re
import runpy
import subprocess
from pathlib import Path
from typing import Any

import pytest

import loaderd
from loaderd.cli.main import main
from loaderd.errors import install_hint

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def setup() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def test_every_package_is_installed(setup: configparser.ConfigParser):
    there = {
        ".".join(path.parent.relative_to(root).parts)
        for root in (ROOT, ROOT / "bindings")
        for package in root.glob("loaderd*")
        for path in package.rglob("__init__.py")
    }
    assert set(setup["options"]["packages"].split()) == there
    for path in [*ROOT.glob("loaderd/**/*.py"), *ROOT.glob("bindings/**/*.py")]:
        assert (path.parent / "__init__.py").exists(), path
    typed = {package for package, files in setup["options.package_data"].items() if "py.typed" in files}
    assert typed == {package for package in there if "." not in package}


def test_the_environments_have_what_their_programs_import(setup: configparser.ConfigParser):
    """``make test`` has every extra of loaderd's own, and whatever starts a server has its packages."""
    of = {name: set(text.splitlines()) for name, text in setup["options.extras_require"].items()}
    for name in ("compiled", "console", "fast", "images", "metrics", "server"):
        assert of[name] <= of["test"], name
    assert of["server"] <= of["bench"] and of["server"] <= of["ray"]
    for name, text in setup["options.extras_require"].items():
        assert len(of[name]) == len(text.splitlines()), f"{name} names a package twice"


def test_the_version_stands_in_one_place(setup: configparser.ConfigParser, capsys: pytest.CaptureFixture[str]):
    assert setup["metadata"]["version"] == "attr: loaderd.version.VERSION"
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--version"])
    assert capsys.readouterr().out == f"loaderd {loaderd.__version__}\n"
    sources = [path for folder in ("loaderd", "bindings") for path in (ROOT / folder).rglob("*.py")]
    where = [path.name for path in sources if f'"{loaderd.__version__}"' in path.read_text()]
    assert where == ["version.py"]
    (newest, *_) = re.findall(r"^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert newest == loaderd.__version__


def test_the_licence(setup: configparser.ConfigParser):
    assert setup["metadata"]["license"] == "Apache-2.0"
    text = (ROOT / setup["metadata"]["license_files"]).read_text()
    assert "Version 2.0, January 2004" in text and "END OF TERMS AND CONDITIONS" in text


def test_the_makefile_installs_the_tensorflow_that_is_asked_for(setup: configparser.ConfigParser):
    (bound,) = re.findall(r"tensorflow-cpu(>=[\d.]+)", setup["options.extras_require"]["tensorflow"])
    assert set(re.findall(r"(?:tensorflow-cpu|and-cuda\])(>=[\d.]+)", (ROOT / "Makefile").read_text())) == {bound}


def test_compat_runs_tests_that_are_there():
    for path in runpy.run_path(str(ROOT / "tests" / "compat.py"))["TESTS"]:
        assert (ROOT / path).exists(), path


def test_compat_tests_the_versions_that_setup_cfg_names_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    compat = runpy.run_path(str(ROOT / "tests" / "compat.py"))
    setup, commands = tmp_path / "setup.cfg", list[str]()

    def run(command: list[Any], **options: Any) -> subprocess.CompletedProcess[str]:
        commands.append(" ".join(map(str, command)))
        if "venv" in command:  # of which the folder is the last word
            command[-1].mkdir(exist_ok=True)
        return subprocess.CompletedProcess(command, 0)

    def made_for(which: str, bound: str) -> tuple[bool, bool]:
        """Whether the environment was made anew, and whether something was installed in it."""
        setup.write_text(f"[options]\ninstall_requires =\n    rich>={bound}\n[options.extras_require]\none = x>=1\n")
        commands.clear()
        with pytest.raises(SystemExit, match=r"^0$"):
            compat["main"](which, "python3.10")
        installed = f"rich=={bound} x==1" if which == "oldest" else f"--upgrade rich>={bound} x>=1"
        return any(" -m venv " in each for each in commands), any(installed in each for each in commands)

    monkeypatch.setattr("subprocess.run", run)
    compat["main"].__globals__.update(ROOT=tmp_path, EXTRAS=["one"], interpreter=lambda name: name)
    for which, again in (("oldest", False), ("newest", True)):
        found = [made_for(which, bound) for bound in ("13", "13", "14")]
        assert found == [(True, True), (False, again), (True, True)]


def test_hints_name_what_an_extra_needs(monkeypatch: pytest.MonkeyPatch):
    """Not what setup.cfg says: an environment in which loaderd is editable may have older metadata."""
    found = [
        "numpy>=2.0",
        'rich>=13; extra == "console"',
        'ray[train]>=2.60; extra == "ray"',
        "uvicorn; extra == 'ray'",
    ]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: found)
    assert install_hint("console") == "pip install 'rich>=13'"
    assert install_hint("ray") == "pip install 'ray[train]>=2.60' 'uvicorn'"

    def requires(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    assert install_hint("fast") == "pip install '.[fast]'"


def test_no_hint_takes_loaderd_from_an_index():
    sources = [path for room in ("loaderd", "bindings", "docs") for path in (ROOT / room).rglob("*.[pm][yd]")]
    texts = {path.name: path.read_text() for path in [*sources, ROOT / "README.md"]}
    assert [name for name, text in texts.items() if re.search(r"pip install '?loaderd", text)] == []
