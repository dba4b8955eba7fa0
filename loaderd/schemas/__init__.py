"""Schemas that ship ready-made: each says where its format is described."""

from loaderd.schemas.chess import chess_eval, chess_score
from loaderd.schemas.digits import mnist
from loaderd.schemas.kata import katago
from loaderd.schemas.leela import lc0
from loaderd.schemas.mini import minigo
from loaderd.schemas.nnue import bullet, marlin, nnue_bin

__all__ = ["bullet", "chess_eval", "chess_score", "katago", "lc0", "marlin", "minigo", "mnist", "nnue_bin"]
