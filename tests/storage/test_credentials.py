"""Which host is asked, and with which credentials, in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from loaderd.storage.credentials import asked_of

NAMES = """
    AWS_ACCESS_KEY_ID AWS_PROFILE AWS_DEFAULT_PROFILE AWS_SHARED_CREDENTIALS_FILE AWS_CONFIG_FILE AZURE_CLIENT_ID
    AWS_WEB_IDENTITY_TOKEN_FILE AWS_CONTAINER_CREDENTIALS_FULL_URI AWS_CONTAINER_CREDENTIALS_RELATIVE_URI
    AWS_EC2_METADATA_DISABLED AWS_ENDPOINT_URL AWS_ENDPOINT_URL_S3 GOOGLE_APPLICATION_CREDENTIALS
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in NAMES.split():
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("uri", "asked"),
    [
        ("s3://a:b@bucket/x/y?region=eu-west-1", "bucket.s3.eu-west-1.amazonaws.com, with the key in the URI"),
        ("s3://***@bucket/x", "bucket.s3.amazonaws.com, with the key in the URI"),
        ("s3://a:b@bucket/x?endpoint_override=minio:9000&scheme=http", "minio:9000, with the key in the URI"),
        (
            "gs://anonymous@bucket/x",
            "storage.googleapis.com, with no credentials, as the URI asks for it (anonymous)",
        ),
        ("abfs://box:key@account.dfs.core.windows.net/x", "account.dfs.core.windows.net, with the key in the URI"),
        ("hdfs://name:8020/x", ""),
        ("/data/x", ""),
    ],
)
def test_of_what_the_uri_says(uri: str, asked: str):
    assert asked_of(uri) == asked


def test_of_s3s_credentials_the_first_are_named_that_there_are(home: Path, monkeypatch: pytest.MonkeyPatch):
    def found() -> str:
        return asked_of("s3://bucket/x").partition(", with ")[2]

    nowhere = f"neither the environment nor the profile 'default' of {home}/.aws/credentials has a key"
    assert found() == f"the credentials of the machine's metadata service, if it has one: {nowhere}"
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    assert found() == f"no credentials: {nowhere}, and AWS_EC2_METADATA_DISABLED is set"
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", "/var/token")
    assert found() == "AWS_WEB_IDENTITY_TOKEN_FILE of the environment"
    (home / ".aws").mkdir()
    (home / ".aws/config").write_text("[profile train]\nsso_session = x\n")
    monkeypatch.setenv("AWS_PROFILE", "train")
    assert found() == f"the profile 'train' of {home}/.aws/config"
    (home / "keys").write_text("[train]\naws_access_key_id = a\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "~/keys")
    assert found() == f"the profile 'train' of {home}/keys"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    assert found() == "AWS_ACCESS_KEY_ID of the environment"


def test_of_googles_and_azures(home: Path, monkeypatch: pytest.MonkeyPatch):
    kept = home / ".config/gcloud/application_default_credentials.json"
    assert f"neither GOOGLE_APPLICATION_CREDENTIALS nor {kept} is there" in asked_of("gs://bucket/x")
    kept.parent.mkdir(parents=True)
    kept.touch()
    assert asked_of("gs://bucket/x") == f"storage.googleapis.com, with the credentials in {kept}"
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/etc/key.json")
    assert asked_of("gs://bucket/x").endswith("GOOGLE_APPLICATION_CREDENTIALS of the environment: /etc/key.json")
    assert "`az login`" in asked_of("abfs://box@account.dfs.core.windows.net/x")
    monkeypatch.setenv("AZURE_CLIENT_ID", "one")
    assert asked_of("abfs://box@account.dfs.core.windows.net/x").endswith("AZURE_CLIENT_ID of the environment")
