"""Which cells answers have, and which of them are kept."""

from __future__ import annotations

import gc

import pytest

from loaderd.errors import OptionError
from loaderd.gateway.answers import CELL_BYTES, Answer, Answers, NotReady

CELLS = 32


class Scene:
    """Answers of so many cells each; ``made``: the tickets that were made, in order."""

    def __init__(self) -> None:
        self.answers = Answers(CELLS * CELL_BYTES)
        self.made: list[int] = []

    def get(self, ticket: int, num_cells: int) -> Answer:
        """The answer is written to all of its cells, and nobody sends it when it is returned."""
        answer = self.begin(ticket, num_cells)
        rows = self.answers.rows(answer)
        assert rows.size == num_cells * CELL_BYTES and (rows[::CELL_BYTES] == ticket).all()
        return answer

    def begin(self, ticket: int, num_cells: int) -> Answer:
        def make(answer: Answer) -> None:
            self.made.append(ticket)
            if num_cells > 1:
                self.answers.widen(answer, num_cells * CELL_BYTES - 1)
            start = answer.cells.start * CELL_BYTES
            self.answers.memory.bytes[start : start + num_cells * CELL_BYTES : CELL_BYTES] = ticket
            answer.num_rows, answer.row_bytes = num_cells, CELL_BYTES

        return self.answers.get(bytes([ticket]), make)[0]


def test_answers_of_several_cells_are_kept_as_others_are():
    scene = Scene()
    sizes = {ticket: 1 + ticket % 4 for ticket in range(1, 13)}  # 30 cells
    for _ in range(2):
        for ticket, num_cells in sizes.items():
            scene.get(ticket, num_cells)
    assert scene.made == list(sizes)


def test_the_answer_that_was_asked_for_least_recently_is_forgotten():
    scene = Scene()
    for ticket in (1, 2, 3, 4, 1, 5, 6):  # 2 and 3 make room for 5 and 6
        scene.get(ticket, 8)
    scene.made.clear()
    for ticket in (1, 4, 5, 6):
        scene.get(ticket, 8)
    assert scene.made == []


def test_what_is_sent_stays_where_it_is():
    scene = Scene()
    sent = scene.answers.rows(scene.begin(1, 12))
    for ticket in range(2, 40):
        scene.get(ticket, 1 + ticket % 20)
    with pytest.raises(NotReady, match="full"):
        scene.get(99, 21)
    assert (sent[::CELL_BYTES] == 1).all()
    del sent
    gc.collect()
    for ticket in (100, 101):
        scene.get(ticket, CELLS)


def test_an_answer_without_room_gives_its_cell_back_once():
    """Another one has it as soon as it is free."""
    scene = Scene()
    sent = [scene.answers.rows(scene.begin(1, 12))]

    def make(answer: Answer) -> None:
        try:
            scene.answers.widen(answer, 21 * CELL_BYTES)
        finally:
            sent.extend(scene.answers.rows(scene.begin(ticket, 1)) for ticket in range(2, 22))

    with pytest.raises(NotReady, match="full"):
        scene.answers.get(b"99", make)
    with pytest.raises(NotReady, match="full"):
        scene.get(100, 1)
    assert [rows[0] for rows in sent] == list(range(1, 22))


def test_what_never_has_room_is_refused():
    scene = Scene()
    for _ in range(2 * CELLS):  # nothing is lost by it
        with pytest.raises(OptionError, match=r"larger than the server's memory.*33,554,432 bytes\n.*--cache 33MiB"):
            scene.get(1, CELLS + 1)
    scene.get(2, CELLS)
