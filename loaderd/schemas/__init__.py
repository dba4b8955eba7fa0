"""Schemas that ship ready-made: each says where its format is described."""

from loaderd.schemas.ceres import ceres_tpg
from loaderd.schemas.chess import chess_eval, chess_score
from loaderd.schemas.digits import mnist
from loaderd.schemas.kata import katago
from loaderd.schemas.leela import lc0
from loaderd.schemas.mini import minigo
from loaderd.schemas.nnue import bullet, marlin, nnue_bin
from loaderd.schemas.shogi import hcpe, psv

__all__ = [
    "bullet",
    "ceres_tpg",
    "chess_eval",
    "chess_score",
    "hcpe",
    "katago",
    "lc0",
    "marlin",
    "minigo",
    "mnist",
    "nnue_bin",
    "psv",
]
