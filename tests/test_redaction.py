"""No text for people holds a secret of a URI."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest

import loaderd
from loaderd.errors import Damage, OptionError, ShardReadError, from_wire, to_wire
from loaderd.redaction import readable, readable_line, redacted


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://KEY:SECRET@bucket/x", "s3://***@bucket/x"),
        ("s3://KEY:SE/C+RET@bucket/x?region=eu", "s3://***@bucket/x?region=eu"),
        ("s3://KEY:9/SECRET@bucket/x", "s3://***@bucket/x"),
        ("gs://anonymous@bucket/a?scheme=http", "gs://anonymous@bucket/a?scheme=http"),
        ("s3://b/x?secret_key=abc&region=eu", "s3://b/x?secret_key=***&region=eu"),
        ("s3://b/x?X-Amz-Signature=abc&X-Amz-Credential=d", "s3://b/x?X-Amz-Signature=***&X-Amz-Credential=***"),
        ("abfs://c@a/x?sv=2&sig=abc%3D", "abfs://c@a/x?sv=2&sig=***"),
        ("https://host:80/p@q?monkey=3", "https://host:80/p@q?monkey=3"),
        ("s3://a:b@c: 4 and s3://d:e@f/x?token=g", "s3://***@c: 4 and s3://***@f/x?token=***"),
        ("/data/key=1/a:b@c", "/data/key=1/a:b@c"),
        ("https://h/x?apikey=abc&accesskeyid=d", "https://h/x?apikey=***&accesskeyid=***"),
        ("https://h/x?AccessToken=abc&sessiontoken=d", "https://h/x?AccessToken=***&sessiontoken=***"),
        ("https://h/x?auth=abc&pass=d&x-auth=e", "https://h/x?auth=***&pass=***&x-auth=***"),
        ("https://h/x?author=a&passes=3&apikeys=2", "https://h/x?author=a&passes=3&apikeys=2"),
        ("https://u:p@ss@@SECRET@h:80/x", "https://***@h:80/x"),
        ("s3://KEY:SE/C@RET@bucket/x@y and a@b", "s3://***@bucket/x@y and a@b"),
        ("s3://a:b@c/d@e", "s3://***@c/d@e"),
        ("s3://a:b@c,s3://d:e@f", "s3://***@c,s3://***@f"),
        ("/home/s3:/KEY:SE/CRET@bucket/x", "/home/s3:/***@bucket/x"),
        ("https:/u:p@h:80/x?token=abc", "https:/***@h:80/x?token=***"),
        ("/data/run:/a:b@c", "/data/run:/a:b@c"),
        ("https:/host:80/p@q", "https:/host:80/p@q"),
        ("https://TOKEN@host/x and s3://KEY@bucket", "https://***@host/x and s3://***@bucket"),
        ("abfs://c@a/x hdfs://user@h/x sftp://user@h/x", "abfs://c@a/x hdfs://user@h/x sftp://user@h/x"),
        ("https://host/p@q", "https://host/p@q"),
        ("https://h/x?secretAccessKey=a&accountKey=b", "https://h/x?secretAccessKey=***&accountKey=***"),
        ("https://h/x?AWSAccessKeyId=a&jwt=b&Bearer=c", "https://h/x?AWSAccessKeyId=***&jwt=***&Bearer=***"),
        ("https://h/x?sasToken=a&mySigningKey=b", "https://h/x?sasToken=***&mySigningKey=***"),
        ("https://h/x?refreshtoken=a&secretaccesskey=b", "https://h/x?refreshtoken=***&secretaccesskey=***"),
        ("https://h/x?keyboard=a&turKey=b&turkey=c", "https://h/x?keyboard=a&turKey=***&turkey=c"),
        ("https://h/x#token=abc", "https://h/x#token=***"),
        ("https://h/x?a=1#access_token=abc&expires=3", "https://h/x?a=1#access_token=***&expires=3"),
        ("s3://b/x?SECRET%5FKEY=abc", "s3://b/x?SECRET%5FKEY=***"),
        ("s3://b/x?%73ecret%255fkey=abc&a=b", "s3://b/x?%73ecret%255fkey=***&a=b"),
        ("s3://b/x?ak=a&sk=abc&task=d&risk=e", "s3://b/x?ak=a&sk=***&task=d&risk=e"),
        (
            "https://h/?u=https%3A%2F%2Fi%2F%3Fsig%3Dabc%26a%3Db",
            "https://h/?u=https%3A%2F%2Fi%2F%3Fsig%3D***%26a%3Db",
        ),
        ("https://h/x?a=token;password=abc", "https://h/x?a=token;password=***"),
    ],
)
def test_secrets_are_hidden_and_nothing_else(text: str, expected: str):
    assert redacted(text) == expected
    assert redacted(expected) == expected


@pytest.mark.parametrize(
    ("first", "again", "last"),
    [
        ("://", ";", ""),
        ("", "s3://a:", ""),
        ("://?", "key-", ""),
        ("://?", "key-", "="),
        ("://?", "sEcretSecret", "x=y"),
        ("://?", "SecreT", "x=y"),
        ("", "https://a@", ""),
        ("https://", "a@", "/@"),
        ("", "s3:/", "@"),
        ("://", "?", "x=y"),
        ("://?", "%3f", "x=y"),
        ("://?", "%25", "token=y"),
        ("://?token=", "#token=", ""),
        ("://?token=", "%", ""),
    ],
)
def test_a_long_text_is_no_harder_than_many_short_ones(first: str, again: str, last: str):
    """Texts come from other machines, too, and nothing else runs meanwhile."""
    began_s = time.monotonic()
    redacted(first + again * ((1 << 20) // len(again)) + last)
    assert time.monotonic() - began_s < 10, "it takes milliseconds, or hours"


@pytest.mark.parametrize(
    "refuse",
    [
        lambda uris: loaderd.Dataset([uris], loaderd.schemas.chess_eval()),
        lambda uris: loaderd.Storage(cache_dir=uris),
        lambda uris: loaderd.Position.from_json(" ".join(uris)),
    ],
)
def test_a_quoted_value_is_cut_behind_its_secrets(refuse: Callable[[list[str]], Any]):
    for before in range(60, 320, 5):
        with pytest.raises(OptionError) as caught:
            refuse(["x" * before, "s3://KEY:SECRET@bucket/x"])
        assert "xxx" in str(caught.value) and "SE" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\x1b[2Jb\x07\x9b\x7f\r\t", r"a\x1b[2Jb\x07\x9b\x7f\r\t"),
        (
            "\u202egpj.exe \u2066 \u200b \u2028 \ufeff \U000e0041",
            r"\u202egpj.exe \u2066 \u200b \u2028 \ufeff \U000e0041",
        ),
        ("caf\u00e9 \u68cb C:\\x", "caf\u00e9 \u68cb C:\\x"),
        (os.fsdecode(b"\xff"), r"\udcff"),
        ("one\nall is well\n  indented\n\nlast", "one\n    all is well\n  indented\n\n    last"),
        ("\x1b s3://a:b@c?sk=d\x1b", r"\x1b s3://***@c?sk=***"),
    ],
)
def test_what_a_terminal_would_obey_is_escaped(text: str, expected: str):
    assert readable(text) == expected == readable(expected)
    assert readable_line(text).isprintable()
    error = OptionError(text, hint=text)
    assert str(error) == f"{expected}\n{expected}" == str(from_wire(to_wire(error))) and error.args == (expected,)
    damage = Damage(f"a {text}", 1, 2, f"from {text}", f"in {text}")
    assert str(damage).isprintable() and repr(damage).isprintable()


def test_errors_and_damages_hide_them_by_themselves():
    uri = "s3://KEY:SECRET@bucket/x?token=abc"
    damage = Damage(uri, 1, 2, f"from {uri}", f"in {uri}")
    error = ShardReadError(f"{uri}: no", hint=f"see {uri}", damage=damage, traceback=f"at {uri}")
    for one in (error, pickle.loads(pickle.dumps(error)), from_wire(to_wire(error))):
        text = f"{one} {one!r} {one.args} {one.damages} {to_wire(one)}"
        assert "SECRET" not in text and "abc" not in text and "s3://***@bucket" in text
