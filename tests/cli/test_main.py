"""The command ``loaderd``: what it says of itself, and how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import COMMAND
from serving import handles_of, wait_ends

import loaderd
from loaderd.bench.process_tree import process_tree
from loaderd.cli.main import main, parser


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([COMMAND, *arguments], capture_output=True, text=True, timeout=60)


def test_the_installed_command_knows_its_version() -> None:
    assert run("--version").stdout == f"loaderd {loaderd.__version__}\n"
    module = subprocess.run(
        [sys.executable, "-m", "loaderd", "--version"], capture_output=True, text=True, timeout=60
    )
    assert module.stdout == f"loaderd {loaderd.__version__}\n"


def test_help_names_every_command_and_every_option_says_what_it_does() -> None:
    assert "bench" in run("--help").stdout
    shown = run("bench", "--help")
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


@pytest.mark.parametrize("arguments", ["{}", "verify x --bogus {}", "bench --batch-size {}", "serve --log-format {}"])
def test_no_error_shows_a_secret_that_was_typed(capsys: pytest.CaptureFixture[str], arguments: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments.format("s3://KEY:SECRET@bucket/x").split())
    error = capsys.readouterr().err
    assert ended.value.code == 2 and "s3://***@bucket/x" in error and "SECRET" not in error


STATUS_OF = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGKILL: -9}
_LOST = "Exception ignored in: "  # Python's word of a signal that came in a callback


@pytest.mark.slow
@pytest.mark.parametrize("number", STATUS_OF)
def test_what_ends_a_measurement_ends_all_its_processes(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "scratch").mkdir()
    options = ["--records", "2000", "--num-shards", "2", "--candidates", "floor loaderd_python", "--seconds", "60"]
    process = subprocess.Popen(
        [COMMAND, "bench", *options, "--work-dir", str(tmp_path), "--results-dir", str(tmp_path), "--name", "x"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path / "scratch")},
    )
    log = tmp_path / "x.jsonl"
    while process.poll() is None and (not log.exists() or log.read_text().count("\n") < 2):
        time.sleep(0.01)  # until the cold starts are done: the first round takes 60 s
    while process.poll() is None and len(tree := process_tree(process.pid)) < 3:
        time.sleep(0.01)
    handles = handles_of(tree[1:])
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == STATUS_OF[number] and (errors.startswith(_LOST) or "Traceback" not in errors)
    wait_ends(handles)
    assert number == signal.SIGKILL or not os.listdir(tmp_path / "scratch")


def test_a_terminal_that_closes_while_shards_are_made_leaves_none(tmp_path: Path) -> None:
    work = tmp_path / "work"
    command = [COMMAND, "bench", "--records", "50000000", "--num-shards", "2", "--work-dir", str(work)]
    with subprocess.Popen([*command, "--candidates", "floor"], stderr=subprocess.PIPE, text=True) as process:
        try:
            while process.poll() is None and not [*work.glob("*/*.tfrecord")]:
                time.sleep(0.01)
            process.send_signal(signal.SIGHUP)
            errors = process.communicate(timeout=60)[1]
            assert not errors or errors.startswith(_LOST), errors
            assert process.returncode == 129 and not [*work.iterdir()]
        finally:
            process.kill()


def test_a_signal_in_a_callback_is_not_lost() -> None:
    """What is raised there goes no further. And what is removed on the way out is removed in peace."""
    program = f"""
import signal, time
from loaderd.bench.command import exit_on_signals

class Callback:
    def __del__(self):
        signal.raise_signal({int(signal.SIGHUP)})
        time.sleep(0)

with exit_on_signals():
    try:
        Callback()
        time.sleep(60)
    finally:
        time.sleep(1.5)
        print("removed")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout) == (129, "removed\n")


def test_nohup_is_heeded(tmp_path: Path) -> None:
    """A hangup is ignored where it was before."""
    program = "import signal; from loaderd.bench.command import exit_on_signals\nwith exit_on_signals(): "
    program += "print(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN)"
    done = subprocess.run(["nohup", sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "True\n"
