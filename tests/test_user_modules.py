"""Where a module that is named on a command line is looked for."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from loaderd.errors import OptionError
from loaderd.user_modules import add_working_directory


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, which is not in ``sys.path``, as in a command."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", os.getcwd())])
    return folder


@pytest.mark.parametrize("place", ["nobodys.py", "nobodys/records.py"])
def test_one_of_the_working_directory_comes_last(here: Path, place: str):
    (here / place).parent.mkdir(exist_ok=True)
    (here / place).touch()
    before = list(sys.path)
    add_working_directory("nobodys.records:schema")
    add_working_directory("nobodys.records:other")
    assert sys.path == [*before, str(here)]


@pytest.mark.parametrize("name", ["loaderd.schemas:lc0", "nowhere:schema", "numpy:schema", ":", "nobodys"])
def test_for_others_the_folder_is_not_in_the_path(here: Path, name: str):
    for own in ("loaderd.py", "numpy.py"):
        (here / own).touch()
    before = list(sys.path)
    add_working_directory(name)
    assert sys.path == before


def test_it_is_preferred_to_an_installed_one_of_its_name(here: Path, tmp_path: Path):
    """To nothing else: what is imported from the folders before that still is."""
    installed = tmp_path / "installed"
    installed.mkdir()
    for folder in (here, installed):
        (folder / "nobodys.py").touch()
    sys.path.insert(1, str(installed))
    add_working_directory("nobodys:train")
    assert sys.path[1:3] == [str(here), str(installed)]


def test_a_name_of_pythons_own_is_refused(here: Path):
    (here / "types.py").touch()
    with pytest.raises(OptionError, match="types:train names a module of Python's own: types"):
        add_working_directory("types:train")


def test_a_working_directory_that_has_been_deleted(here: Path):
    here.rmdir()
    before = list(sys.path)
    add_working_directory("nobodys:schema")
    assert sys.path == before
