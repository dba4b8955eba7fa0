"""What is asked when a URI is read, in words: which host, and with credentials from where.

The libraries below ``pyarrow.fs`` look for credentials in places of their own, in an order of their own, and do not
say which of them they took. So this follows the same order. It reads no secret.
"""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import parse_qs

from loaderd.redaction import HIDDEN
from loaderd.storage.shard_file import uri_parts

_AWS_VARIABLES = (
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
)


def asked_of(uri: str) -> str:
    """Which host answers for a URI, and with which credentials it is asked; "" where that is not known."""
    parts = uri_parts(uri)
    user = parts.netloc.rpartition("@")[0]
    credentials = {"s3": _s3_credentials, "gs": _google_credentials, "gcs": _google_credentials}
    credentials |= {"abfs": _azure_credentials, "abfss": _azure_credentials}
    if parts.scheme not in credentials:
        return ""
    return f"{host_of(uri)}, with {credentials[parts.scheme](user)}"


def host_of(uri: str) -> str:
    """The host that answers for a URI, maybe with a port."""
    parts = uri_parts(uri)
    place = parts.netloc.rpartition("@")[2]
    query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    if parts.scheme in ("gs", "gcs"):
        return query.get("endpoint_override", "storage.googleapis.com")
    if parts.scheme != "s3":
        return place
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
    override = query.get("endpoint_override") or next(filter(None, map(os.environ.get, names)), None)
    region = query.get("region")
    return override or f"{place}.s3.{region}.amazonaws.com".replace(".None.", ".")


def _s3_credentials(user: str) -> str:
    if user:
        return "the key in the URI"
    environment = os.environ
    if environment.get("AWS_ACCESS_KEY_ID"):
        return "AWS_ACCESS_KEY_ID of the environment"
    profile = environment.get("AWS_PROFILE") or environment.get("AWS_DEFAULT_PROFILE") or "default"
    keys = Path(environment.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials").expanduser()
    config = Path(environment.get("AWS_CONFIG_FILE") or "~/.aws/config").expanduser()
    for path, section in ((keys, profile), (config, profile if profile == "default" else f"profile {profile}")):
        if _has_section(path, section):
            return f"the profile {profile!r} of {path}"
    for name in filter(environment.get, _AWS_VARIABLES):
        return f"{name} of the environment"
    nowhere = f"neither the environment nor the profile {profile!r} of {keys} has a key"
    if environment.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        return f"no credentials: {nowhere}, and AWS_EC2_METADATA_DISABLED is set"
    return f"the credentials of the machine's metadata service, if it has one: {nowhere}"


def _has_section(path: Path, name: str) -> bool:
    try:
        return f"[{name}]" in path.read_text(errors="replace")
    except OSError:
        return False


def _google_credentials(user: str) -> str:
    if user == "anonymous":
        return "no credentials, as the URI asks for it (anonymous)"
    if path := os.environ.get("GOOGLE_APPLICATION_CREDENTIALS"):
        return f"GOOGLE_APPLICATION_CREDENTIALS of the environment: {path}"
    of_user = Path("~/.config/gcloud/application_default_credentials.json").expanduser()
    if of_user.exists():
        return f"the credentials in {of_user}"
    nowhere = f"neither GOOGLE_APPLICATION_CREDENTIALS nor {of_user} is there"
    return f"the credentials of Google's metadata service, which is on its own machines only: {nowhere}"


def _azure_credentials(user: str) -> str:
    if ":" in user or HIDDEN in user:
        return "the key in the URI"
    if os.environ.get("AZURE_CLIENT_ID"):
        return "AZURE_CLIENT_ID of the environment"
    return "the credentials of `az login` or of the machine's identity, as AZURE_CLIENT_ID is not set"
