"""What a server may be told at its start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loaderd.errors import OptionError
from loaderd.server.settings import Address, ServerOptions, parse_bytes


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


def make(**given: Any) -> ServerOptions:
    return ServerOptions(**{"targets": ("a.b:train",), "unix": "/tmp/x.sock", **given})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"targets": ()}, "what is served must be"),
        ({"targets": ("a.b",)}, "mypackage.module:dataset"),
        ({"targets": ("a.b:c:d",)}, "mypackage.module:dataset"),
        ({"targets": ("../a:b",)}, "mypackage.module:dataset"),
        ({"workers": 0}, "workers must be"),
        ({"workers": 250}, "workers must be at most 249, got 250"),
        ({"max_consumers": 0}, "max_consumers must be"),
        ({"max_held_batches": -1}, "max_held_batches must be"),
        ({"idle_timeout": 0.0}, "idle_timeout must be"),
        ({"grace": -1.0}, "grace must be"),
        ({"watchdog": 0.1}, "watchdog must be"),
        ({"max_memory": 0}, "max_memory must be"),
        ({"makers": 0}, "makers must be"),
        ({"cache": -1}, "cache must be"),
        ({"log_format": "xml"}, "log_format must be"),
        ({"tls_cert": __file__}, "go together"),
        ({"tls_client_ca": __file__}, "--tls-client-ca needs"),
        ({"tls_cert": __file__, "tls_key": __file__}, "is for the network"),
        ({"listen": Address("127.0.0.1", 1), "tls_cert": "/missing", "tls_key": __file__}, "cannot read /missing"),
    ],
)
def test_what_is_refused(wrong: dict[str, Any], message: str):
    with pytest.raises(OptionError, match=message):
        make(**wrong)


def test_the_network_beyond_loopback_needs_tls_and_a_token_or_a_word():
    everywhere, here = Address("0.0.0.0", 8471), Address("127.0.0.1", 8471)
    tls = {"tls_cert": __file__, "tls_key": __file__}
    for given, missing in (
        ({}, ["TLS", "a token"]),
        ({"token": "secret"}, ["TLS"]),
        (tls, ["a token"]),
        ({**tls, "tls_client_ca": __file__}, ["a token"]),
    ):
        with pytest.raises(
            OptionError, match="needs " + " and ".join(rf"{each} \([^)]*\)" for each in missing)
        ) as caught:
            make(listen=everywhere, **given)
        assert "--insecure" in caught.value.hint and "secret" not in str(caught.value)
        make(listen=everywhere, insecure=True, **given)
        make(listen=here, **given)
    make(listen=everywhere, token="secret", **tls)


def test_the_token_is_not_shown():
    assert "secret" not in repr(make(listen=Address("127.0.0.1", 1), token="secret"))


def test_what_the_processes_are_told(tmp_path: Path):
    options = make(listen=Address("::1", 8471), token="secret", workers=3, max_bandwidth=10, idle_timeout=5.0)
    assert options.for_daemon("/m", {"train": "k"}) == {
        "targets": ["a.b:train"],
        "workers": 3,
        "max_consumers": 64,
        "max_held_batches": 64,
        "max_memory": None,
        "idle_timeout": 5.0,
        "log_format": "lines",
        "manifests": "/m",
        "current": {"train": "k"},
    }
    gateway = options.for_gateway(Address("::1", 8471))
    assert (gateway["makers"], gateway["cache"], gateway["max_bandwidth"]) == (3, 256 << 20, 10)
    assert (gateway["host"], gateway["port"], gateway["unix"], gateway["token"]) == (
        "::1",
        8471,
        "/tmp/x.sock",
        "secret",
    )
