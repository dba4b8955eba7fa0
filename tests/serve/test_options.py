"""What a server may be told at its start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loaderd.errors import OptionError
from loaderd.serve.options import Address, HttpOptions, parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4096B", 4096),
        ("100MB", 100_000_000),
        ("1.5 GiB", 3 << 29),
        ("2kB", 2000),
        ("2KiB", 2048),
        (" 7 MiB ", 7 << 20),
    ],
)
def test_numbers_of_bytes(text: str, expected: int):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "fast", "4096", "-1MB", "0", "1mb", "1 TB", "1e3", "MB", "kiB"])
def test_what_is_no_number_of_bytes(text: str):
    with pytest.raises(OptionError, match="like 100MB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "host", "port", "is_loopback"),
    [
        ("127.0.0.1:8471", "127.0.0.1", 8471, True),
        ("127.9.9.9:1", "127.9.9.9", 1, True),
        ("localhost:0", "localhost", 0, True),
        ("[::1]:80", "::1", 80, True),
        ("[::]:8471", "::", 8471, False),
        ("0.0.0.0:8471", "0.0.0.0", 8471, False),
        ("10.0.0.1:8471", "10.0.0.1", 8471, False),
    ],
)
def test_addresses(text: str, host: str, port: int, is_loopback: bool):
    address = Address.parse(text)
    assert (address.host, address.port, address.is_loopback, str(address)) == (host, port, is_loopback, text)


@pytest.mark.parametrize(
    "text", ["8471", ":8471", "host", "host:", "host:70000", "host:-1", "host:x", "::1:80", "[]:1"]
)
def test_what_is_no_address(text: str):
    with pytest.raises(OptionError, match="HOST:PORT"):
        Address.parse(text)


def test_a_name_that_nobody_knows():
    with pytest.raises(OptionError, match=r"cannot listen at nowhere\.invalid:1"):
        _ = Address("nowhere.invalid", 1).is_loopback


def http(**options: Any) -> HttpOptions:
    return HttpOptions(**{"targets": ("a.b:train",), **options})


def test_the_network_beyond_loopback_needs_tls_and_a_token_or_a_word(tmp_path: Path, monkeypatch):
    monkeypatch.delenv("LOADERD_TOKEN", raising=False)
    everywhere, here = Address("0.0.0.0", 8471), Address("127.0.0.1", 8471)
    (tmp_path / "token").write_text("secret\nanother\n")
    (tmp_path / "token").chmod(0o600)
    token = {"token_file": str(tmp_path / "token")}
    tls = {"tls_cert": __file__, "tls_key": __file__}
    for options, missing in (
        ({}, ["TLS", "a token"]),
        (token, ["TLS"]),
        (tls, ["a token"]),
        ({**tls, "tls_client_ca": __file__}, ["a token"]),
    ):
        needs = "needs " + " and ".join(rf"{each} \([^)]*\)" for each in missing)
        with pytest.raises(OptionError, match=needs) as caught:
            http(listen=everywhere, **options)
        assert "--insecure" in caught.value.hint and "secret" not in str(caught.value)
        http(listen=everywhere, insecure=True, **options)
        http(listen=here, **options)
    options = http(listen=everywhere, **token, **tls)
    assert options.tokens() == ["secret", "another"] and "secret" not in repr(options)
