"""The command ``loaderd``: what it says of itself, and how it ends."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import loaderd
from loaderd.cli.main import main, parser
from loaderd.errors import install_hint
from tests.helpers.commands import COMMAND


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([COMMAND, *arguments], capture_output=True, text=True, timeout=60)


def test_the_installed_command_knows_its_version() -> None:
    assert run("--version").stdout == f"loaderd {loaderd.__version__}\n"
    module = subprocess.run(
        [sys.executable, "-m", "loaderd", "--version"], capture_output=True, text=True, timeout=60
    )
    assert module.stdout == f"loaderd {loaderd.__version__}\n"


def test_help_names_every_command_and_every_option_says_what_it_does() -> None:
    (commands,) = [action for action in parser()._actions if isinstance(action.choices, dict)]
    for command in commands.choices.values():
        assert command.description and command.epilog
        assert not [action.dest for action in command._actions if not action.help]


def test_a_command_does_not_import_the_others() -> None:
    program = "import sys; from loaderd.cli.main import main; sys.argv[1:] = ['serve', '--help']\n"
    program += "try: main()\nexcept SystemExit: print(sorted(name for name in sys.modules if 'loaderd.cli' in name))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    mine = [f"loaderd.cli{name}" for name in ("", ".main", ".serve", ".standard_output")]
    assert done.stdout.splitlines()[-1] == str(mine)


def test_help_is_asked_for_in_several_ways() -> None:
    done = run()
    assert (done.returncode, done.stderr) == (0, "") and done.stdout == run("--help").stdout == run("help").stdout
    for title, names in {"look at data": "inspect verify index convert", "train": "doctor top"}.items():
        group = done.stdout.split(f"\n{title}:\n")[1].split("\n\n")[0]
        assert [line.split()[0] for line in group.splitlines()] == names.split()
    shown = run("help", "verify")
    assert shown.returncode == 0 and "SHARDS" in shown.stdout and shown.stdout == run("verify", "--help").stdout


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("hlep", "; did you mean help?"), ("insepct", "; did you mean inspect?"), ("xyzzy", "")],
)
def test_an_unknown_command(typed: str, meant: str) -> None:
    done = run(typed)
    assert done.returncode == 2 and done.stderr.splitlines()[-1].endswith(f"there is no command '{typed}'{meant}")


EXAMPLES = {
    name: command.epilog.removeprefix("example: loaderd ")
    for action in parser()._actions
    if isinstance(action.choices, dict)
    for name, command in action.choices.items()
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_of_each_command(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that need no server run as they are written; the arguments of the others are good."""
    words = shlex.split(EXAMPLES[name])
    assert words[0] == name
    if name in ("serve", "status"):
        parser().parse_args(words)
        return
    monkeypatch.chdir(tmp_path)
    loaderd.testing.write_shards("shards", {"d": np.ones((200, 1552), bool), "s": np.arange(200)}, num_shards=2)
    for library in {"top": ["rich"], "inspect": ["PIL"]}.get(name, []):
        pytest.importorskip(library)
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0 and capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", ["{}", "verify x --bogus {}", "doctor --batch-size {}", "serve --log-format {}"]
)
def test_no_error_shows_a_secret_that_was_typed(capsys: pytest.CaptureFixture[str], arguments: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments.format("s3://KEY:SECRET@bucket/x").split())
    error = capsys.readouterr().err
    assert ended.value.code == 2 and "s3://***@bucket/x" in error and "SECRET" not in error


@pytest.mark.parametrize(
    ("arguments", "what"),
    [("top --once", "loaderd top"), ("status unix:///nowhere", "loaderd status without --json")],
)
def test_without_rich_it_says_what_to_install(arguments: str, what: str) -> None:
    program = "import sys; sys.modules['rich'] = None; from loaderd.cli.main import main; main()"
    command = [sys.executable, "-c", program, *arguments.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, f"{what} needs rich: {install_hint('console')}\n")
