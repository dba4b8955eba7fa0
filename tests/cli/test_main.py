"""The command ``loaderd``: what it says of itself, and how it ends."""

from __future__ import annotations

import subprocess
import sys

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
    assert "verify" in run("--help").stdout
    shown = run("verify", "--help")
    assert shown.returncode == 0 and "SHARDS" in shown.stdout
    (commands,) = [action for action in parser()._actions if isinstance(action.choices, dict)]
    for command in commands.choices.values():
        assert command.description
        assert not [action.dest for action in command._actions if not action.help]


def test_a_command_does_not_import_the_others() -> None:
    program = "import sys; from loaderd.cli.main import main; sys.argv[1:] = ['serve', '--help']\n"
    program += "try: main()\nexcept SystemExit: print(sorted(name for name in sys.modules if 'loaderd.cli' in name))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    mine = [f"loaderd.cli{name}" for name in ("", ".main", ".serve", ".standard_output")]
    assert done.stdout.splitlines()[-1] == str(mine)


def test_without_a_command_it_says_which_there_are() -> None:
    done = run()
    assert done.returncode == 2 and "COMMAND" in done.stderr


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
