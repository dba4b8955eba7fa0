"""What python-chess is given of a game's moves: nothing in which it would find other moves than are written there."""

from __future__ import annotations

import io
import re
from typing import Any

import chess.pgn
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pgn_text import split_game

TAGS = '[Event "A"]\n[Result "1-0"]\n\n'
WORDS = "e 4 f3 N B P S K = Q - x 0 1 / 2 . + # ! ? $ 12 ( ) -- Z0 0000 @ e.p. * 1-0 1/2-1/2 O-O 0-0 g9 1... h8 ;{ }"


def moves_of(moves: str) -> list[str]:
    """The moves of the main line, as python-chess reads them. Raises ValueError where it is not to read them."""
    tags, text = split_game(f"{TAGS}{moves}\n".encode())
    game: Any = chess.pgn.read_game(io.StringIO(f"{tags}\n\n{text}\n"))
    assert not game.errors, game.errors
    return [move.uci() for move in game.mainline_moves()]


@pytest.mark.parametrize(
    ("moves", "said"),
    [
        ("1. d4 d5 2. ♗f4 ♗f5 3. ♘c3 ♘c6 1-0", "none of PGN, '♗f4'"),
        ("1. Sf3 Sf6 2. Sc3 Sc6 1-0", "none of PGN, 'Sf3'"),
        ("1. nf3 nf6 1-0", "none of PGN, 'nf3'"),
        ("1. N:f3 1-0", "none of PGN, 'N:f3'"),
        ("1. e4 e5 2. Kg9 Kx 3. d4 d5 1-0", "none of PGN, 'Kg9'"),
        ("1. e4 e5 2. castles castles 3. d4 d5 1-0", "none of PGN, 'castles'"),
        ("1. e4 e5 2. 0 - 0 d5 1-0", "none of PGN, '0'"),
        ("1. e4e5d4 1-0", "none of PGN, 'e4e5d4'"),
        ("1. e4 10000. e5 1-0", "none of PGN, '10000.'"),
        ("1. e4 e5 ( 1... c5 2. Nf3 d6", "a variation without its end among the moves, '( 1... c5 2. Nf3 d6"),
        ("1. e4 e5 (1... c5 (1... d5)", "a variation without its end among the moves, '(1... c5 (1... d5)"),
        ("1. e4 e5 ) 2. Nf3 1-0", "the end of a variation among the moves, ') 2. Nf3 1-0"),
        ("(1. d4) 1. e4 e5 1-0", "a variation without a move in front of it, '(1. d4) 1. e4 e5 1-0"),
        ("1. e4 ({ or } (1. d4) 1. c4) e5 1-0", "a variation without a move in front of it, '(1. d4) 1. c4)"),
    ],
)
def test_what_would_be_played_otherwise_is_refused(moves: str, said: str):
    with pytest.raises(ValueError, match=re.escape(said)):
        moves_of(moves)


def test_what_programs_write_is_read():
    plain = moves_of("1. e4 e5 2. Nf3 d6 3. Bc4 Nf6 4. O-O Nxe4 1-0")
    assert len(plain) == 8
    for moves in [
        "1.e4 e5 2.Nf3 d6 3.Bc4 Nf6 4.O-O Nxe4 1-0",
        "1. e4 { [%eval 0.17] [%clk 0:05:00] } 1... e5 { [%eval 0.3] } 2. Nf3! $14 d6?! 3. Bc4 Nf6 4. O-O Nxe4?? { }",
        "1 e4 e5 2 Nf3 Pd6 (2... Nc6 $1 {Sf3} 3. Bb5 (3. d4 -- 4. d5 Z0) a6) (2... f6?) 3 Bc4 Nf6 4 0-0 Nxe4 *",
        "1. e2e4 e7-e5 2. Ng1f3 d7d6 3. Bf1-c4 Ng8-f6 4. O-O!? Nf6xe4$2 -+ 1-0",
        "1. e4 e5 ; Sf3\n% Sf3\n2. Nf3 = d6 +/= 3.\nBc4 Nf6+- 4. O-O ... Nxe4 1-0 { that's it }\n\x1a\n",
    ]:
        assert moves_of(moves) == plain, moves
    split_game(f"{TAGS}1. e4 e5 2. d4 exd4 3. P@e5 1-0\n".encode())  # python-chess names the variant, or the move
    promotions = f'[FEN "4k3/P1P5/8/8/8/8/8/4K3 w - - 0 1"]\n{TAGS}'
    for moves in ["1. a8=Q+ Kd7 2. c8=N#", "1. a8Q+ Kd7 2. c8N", "1. a7a8q Kd7 2. c7-c8=n++"]:
        tags, text = split_game(f"{promotions}{moves} 1-0\n".encode())
        game: Any = chess.pgn.read_game(io.StringIO(f"{tags}\n\n{text}\n"))
        assert [move.uci() for move in game.mainline_moves()] == ["a7a8q", "e8d7", "c7c8n"] and not game.errors


@given(text=st.lists(st.sampled_from([*WORDS.split(), " ", "  "]), max_size=9).map("".join))
def test_python_chess_finds_one_move_at_most_in_a_word(text: str):
    try:
        _, moves = split_game(f"{TAGS}{text}\n".encode())
    except ValueError:
        return
    for word in re.sub(r"\{[^}]*\}|;.*|[()]", " ", moves).split():
        found = [one[0] for one in chess.pgn.MOVETEXT_REGEX.finditer(word) if one[0][0] not in "!?$"]
        left = chess.pgn.MOVETEXT_REGEX.sub("", word).replace("e.p.", "")
        assert len(found) <= 1 and re.fullmatch(r"[1-9]?[0-9]*\.*P?[-+#=/]*", left), (word, found, left)
