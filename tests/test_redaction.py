"""No text for people holds a secret of a URI."""

from __future__ import annotations

import pickle
import time

import pytest

from loaderd.errors import Damage, ShardReadError, from_wire, to_wire
from loaderd.redaction import redacted


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
    ],
)
def test_a_long_text_is_no_harder_than_many_short_ones(first: str, again: str, last: str):
    """Texts come from other machines, too, and nothing else runs meanwhile."""
    began_s = time.monotonic()
    redacted(first + again * ((1 << 20) // len(again)) + last)
    assert time.monotonic() - began_s < 10, "it takes milliseconds, or hours"


def test_errors_and_damages_hide_them_by_themselves():
    uri = "s3://KEY:SECRET@bucket/x?token=abc"
    damage = Damage(uri, 1, 2, f"from {uri}", f"in {uri}")
    error = ShardReadError(f"{uri}: no", hint=f"see {uri}", damage=damage, traceback=f"at {uri}")
    for one in (error, pickle.loads(pickle.dumps(error)), from_wire(to_wire(error))):
        text = f"{one} {one!r} {one.args} {one.damages} {to_wire(one)}"
        assert "SECRET" not in text and "abc" not in text and "s3://***@bucket" in text
