"""Two versions of loaderd beside each other: without any there is nothing to do."""

from __future__ import annotations

import sys

import pytest
import versions


def test_without_folders_it_says_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["versions.py"])
    with pytest.raises(SystemExit, match="2"):
        versions.main()
    assert "give checkouts of loaderd" in capsys.readouterr().err
