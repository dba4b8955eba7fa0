"""Certificates for tests, of the openssl command."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Certificates:
    """Paths of PEM files. ``expired`` goes with ``server_key``; ``other_ca`` has signed nothing of these."""

    ca: str
    other_ca: str
    server_cert: str
    server_key: str
    expired: str
    client_cert: str
    client_key: str


def make_certificates(folder: Path) -> Certificates:
    """Valid for "localhost" and 127.0.0.1. Skips the test where there is no openssl."""
    if shutil.which("openssl") is None:
        pytest.skip("certificates are made with the openssl command, which is not here")
    (folder / "server.ext").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    (folder / "client.ext").write_text("subjectAltName=DNS:consumer\n")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    def request(name: str, *options: str, out: str) -> None:
        openssl("req", *options, "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
                "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", out)  # fmt: skip

    def sign(name: str, *validity: str, out: str) -> None:
        openssl("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
                "-extfile", f"{name}.ext", "-out", f"{out}.pem", *validity)  # fmt: skip

    for name in ("ca", "other_ca"):
        request(name, "-x509", "-days", "30", out=f"{name}.pem")
    for name in ("server", "client"):
        request(name, out=f"{name}.csr")
        sign(name, "-days", "30", out=name)
    sign("server", "-days", "-1", out="expired")
    return Certificates(
        *(str(folder / name) for name in ("ca.pem", "other_ca.pem", "server.pem", "server.key", "expired.pem")),
        client_cert=str(folder / "client.pem"),
        client_key=str(folder / "client.key"),
    )
