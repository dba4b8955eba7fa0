"""The order of files, what a glob matches on this machine, and what it would miss."""

from __future__ import annotations

import glob
import itertools
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loaderd.errors import NoShardsError, ShardReadError
from loaderd.storage import local
from loaderd.storage.files import list_shards
from loaderd.storage.names import absolute_names
from tests.helpers.another_user import another_user

NAMES = [
    "a.rec",
    "b.rec",
    "B.rec",
    "c.txt",
    "10.rec",
    "9.rec",
    ".hidden.rec",
    "sub/d.rec",
    "sub/deep/e.rec",
    "sub-1/d.rec",
    "sub.rec/in.txt",
    ".git/f.rec",
    "with [brackets].rec",
]


def make(folder: Path, names: list[str]) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    return folder


def test_a_long_listing_says_how_many_files_it_has_found(tmp_path: Path):
    make(tmp_path, [f"a{number:03}.rec" for number in range(250)] + [f"b{number:03}.rec" for number in range(120)])
    counts: list[int] = []
    found = list_shards([f"{tmp_path}/a*.rec", f"{tmp_path}/b*.rec"], counts.append)
    assert len(found) == 370 and counts == [100, 200, 250, 350, 370]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return make(tmp_path / "tree", NAMES)


def listed(folder: Path, shards: Any) -> list[str]:
    return [os.path.relpath(file.uri, folder) for file in list_shards(shards)]


# -------------------------------------------------------------------------------------------------------- the order


def test_the_order_is_that_of_the_paths_however_they_are_given(tree: Path):
    """Folder by folder: sub/… comes before sub-1/…, as it does not where paths are compared as text."""
    names = ["10.rec", "9.rec", "B.rec", "a.rec", "b.rec", "sub/d.rec", "sub/deep/e.rec", "sub-1/d.rec"]
    paths = [tree / name for name in names]
    for seed in range(5):
        shuffled = random.Random(seed).sample(paths, len(paths))
        for given in (shuffled, set(shuffled), tuple(map(str, shuffled)), (path for path in shuffled)):
            assert listed(tree, given) == names
    globs = [f"{tree}/*/d.rec", f"{tree}/[0-9]*.rec", f"{tree}/sub/**/e.rec", f"{tree}/[aBb].rec"]
    for given in itertools.permutations(globs):
        assert listed(tree, given) == names


def test_a_file_is_where_its_link_is(tmp_path: Path):
    make(tmp_path / "mounted", ["z/a.rec", "y/b.rec"])
    links = tmp_path / "links"
    links.mkdir()
    (links / "a.rec").symlink_to(tmp_path / "mounted/z/a.rec")
    (links / "b.rec").symlink_to(tmp_path / "mounted/y/b.rec")
    assert listed(links, f"{links}/*.rec") == ["a.rec", "b.rec"]


# ------------------------------------------------------------------------------------------------------------ globs


@pytest.mark.parametrize(
    "pattern",
    [
        "*",
        "**",
        "*/*",
        "**/*",
        "**/**",
        "*.rec",
        "**/*.rec",
        "**/d*",
        "*/**/*.rec",
        "s*/*.rec",
        "sub/**/e.rec",
        ".*",
        "[!a].rec",
        "[0-9]*",
        "?.rec",
        ".*/*",
        "**/.*.rec",
        "*/d.rec",
        "with?[[]*",
        "nothing/*",
        "a.rec/*",
    ],
)
def test_a_glob_matches_what_glob_glob_does(tree: Path, pattern: str):
    (tree / "sub.rec/in.txt").unlink()
    (tree / "sub.rec").rmdir()
    expected = {path for path in glob.glob(f"{tree}/{pattern}", recursive=True) if os.path.isfile(path)}
    try:
        found = {file.uri for file in list_shards(f"{tree}/{pattern}")}
    except NoShardsError:
        found = set()
    assert found == expected


def test_a_folder_named_like_a_shard_is_an_error(tree: Path):
    os.mkfifo(tree / "pipe.rec")
    with pytest.raises(
        NoShardsError, match=r"\*\.rec matches folders or special files named like shards: "
    ) as caught:
        list_shards(f"{tree}/*.rec")
    assert "sub.rec (a folder)" in str(caught.value) and "pipe.rec (not a regular file)" in str(caught.value)
    assert listed(tree, f"{tree}/su*/*") == ["sub/d.rec", "sub-1/d.rec", "sub.rec/in.txt"]


def test_folders_that_hold_the_shards(tmp_path: Path):
    names = ["train/1", "train/train-0.rec", "train/train-1.rec", "train.1/a.rec", "1/1", "1/2"]
    make(tmp_path, names)
    assert listed(tmp_path, f"{tmp_path}/**/train*") == ["train/train-0.rec", "train/train-1.rec"]
    assert set(listed(tmp_path, f"{tmp_path}/**")) == set(names)


@pytest.mark.parametrize("pattern", ["*.rec", "*", "**", "**/*.rec", "*/*.rec"])
def test_links_that_lead_nowhere_are_an_error(tree: Path, pattern: str):
    """A data store that is not mounted: of files in a folder, or of a whole folder."""
    (tree / "sub.rec/in.txt").unlink()
    (tree / "sub.rec").rmdir()
    (tree / ("2024" if "/" in pattern else "z.rec")).symlink_to("/no/such/store")
    with pytest.raises(NoShardsError, match=r"nowhere: .*/no/such/store\nMount or restore"):
        list_shards(f"{tree}/{pattern}")
    (tree / "loop.txt").symlink_to("loop.txt")
    assert listed(tree, f"{tree}/[ab].rec") == ["a.rec", "b.rec"], "what is not matched is not asked about"


def test_a_link_to_nothing_by_its_name(tree: Path):
    (tree / "gone.rec").symlink_to("/no/such/store")
    with pytest.raises(NoShardsError, match=r"gone.rec is a link to /no/such/store, which does not exist"):
        list_shards(tree / "gone.rec")


def test_links_to_folders_that_go_round(tree: Path):
    (tree / "sub/up").symlink_to(tree)
    (tree / "sub/self").symlink_to(".")
    assert listed(tree, f"{tree}/**/[de].rec") == ["sub/d.rec", "sub/deep/e.rec", "sub-1/d.rec"]


def test_a_shard_that_is_deleted_while_a_glob_is_listed(tree: Path, monkeypatch: pytest.MonkeyPatch):
    """As the oldest of data that grow are: it is left out, as if it had been gone before."""
    find = local._matches

    def find_and_delete(pattern: str) -> Iterator[str]:
        found = sorted(find(pattern))
        os.unlink(found[0])
        return iter(found)

    monkeypatch.setattr(local, "_matches", find_and_delete)
    assert listed(tree, f"{tree}/[ab].rec") == ["b.rec"]


# ------------------------------------------------------------------------------------------- what cannot be looked at


@pytest.mark.parametrize(
    ("shards", "path"),
    [
        ("secret/*.rec", "secret"),
        ("**/*.rec", "secret"),
        ("*/*.rec", "secret"),
        ("secret/sub/*.rec", "secret/sub"),
        ("secret/a.rec", "secret/a.rec"),
        ("closed/*.rec", "closed/a.rec"),
    ],
)
def test_what_may_not_be_read_is_no_empty_folder(tmp_path_factory: pytest.TempPathFactory, shards: str, path: str):
    folder = tmp_path_factory.mktemp("open")
    for parent in [folder, *folder.parents][:-2]:
        parent.chmod(parent.stat().st_mode | 0o055)
    make(folder, ["a.rec", "secret/a.rec", "secret/sub/b.rec", "closed/a.rec"])
    (folder / "secret").chmod(0)
    (folder / "closed").chmod(0o444)  # its names may be listed, and no more
    with another_user(), pytest.raises(ShardReadError, match=rf"{path} cannot be read: Permission denied"):
        list_shards(f"{folder}/{shards}")


def test_an_error_says_what_there_is(tree: Path, tmp_path: Path):
    with pytest.raises(NoShardsError, match=rf"matches no file\nThere is no folder {tmp_path}/no/such\."):
        list_shards(f"{tmp_path}/no/such/*.rec")
    with pytest.raises(
        NoShardsError, match=r"\*.tfrec matches no file\n.* holds .git, .hidden.rec, 10.rec and 9 more"
    ):
        list_shards(f"{tree}/*.tfrec")
    (tmp_path / "bare").mkdir()
    with pytest.raises(NoShardsError, match=r"x.rec does not exist\n.*/bare is empty"):
        list_shards(tmp_path / "bare/x.rec")


def test_names_that_do_not_depend_on_the_folder(tree: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tree)
    monkeypatch.setenv("HOME", "/home/me")
    assert absolute_names("sub/../*.rec") == f"{tree}/*.rec"
    assert absolute_names(("~/a", "s3://b/*")) == ("/home/me/a", "s3://b/*")
    assert absolute_names("gs://b/*") == "gs://b/*"


def test_the_folder_above_a_link_is_that_above_its_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As it is to open()."""
    make(tmp_path, ["real/common/a.rec", "real/v3/a.rec", "top/common/b.rec"])
    (tmp_path / "top/current").symlink_to(tmp_path / "real/v3")
    (path,) = list_shards(f"{tmp_path}/top/current/../common/*.rec")
    assert os.path.realpath(path.uri) == f"{tmp_path}/real/common/a.rec"
    (path,) = list_shards(f"{tmp_path}/top/current/../../top/common/b.rec")
    assert os.path.realpath(path.uri) == f"{tmp_path}/top/common/b.rec"
    monkeypatch.chdir(tmp_path / "top")
    assert absolute_names("current/.././common//a.rec") == f"{tmp_path}/top/current/../common/a.rec"
    assert absolute_names("common/../current/x/..") == f"{tmp_path}/top/current"
    assert absolute_names("/../../a/../..") == "/"


@pytest.mark.parametrize("name", ["caf\u00e9/\u00fcber.rec", "caf\u00e9/\u00fcbe*.rec", "caf\u00e9/x.rec"])
def test_a_name_in_another_unicode_form_is_shown_with_escapes(tmp_path: Path, name: str):
    folder = tmp_path / "cafe\u0301"
    folder.mkdir()
    (folder / "u\u0308ber.rec").touch()
    with pytest.raises(NoShardsError) as caught:
        list_shards(str(tmp_path / name))
    assert r"Did you mean 'cafe\u0301'? It looks like 'caf\xe9', but is another Unicode form" in str(caught.value)
    with pytest.raises(NoShardsError) as caught:
        list_shards(str(folder / Path(name).name))
    is_there = "ber" not in name or r"Did you mean 'u\u0308ber.rec'? It looks like '\xfcbe" in str(caught.value)
    assert is_there and ("Did you mean" in str(caught.value)) == ("x.rec" not in name)
