"""Certificates and the token, checked at the start: gRPC's messages do not say what is wrong with them."""

from __future__ import annotations

import ssl
import time
from typing import Any

from loaderd.errors import OptionError
from loaderd.server.settings import ServerOptions

_SOON_S = 7 * 86_400
_SHORT_TOKEN = 16


def check_secrets(options: ServerOptions) -> list[str]:
    """Check the token and the certificates. Returns warnings; raises OptionError if the network cannot be served."""
    warnings = []
    if options.token is not None and len(options.token) < _SHORT_TOKEN:
        warnings.append(
            f"the token has {len(options.token)} characters and could be guessed; {_SHORT_TOKEN} or more are better: "
            "python -c 'import secrets; print(secrets.token_urlsafe(32))'"
        )
    if options.tls_cert is not None and options.tls_key is not None:
        _check_pair(options.tls_cert, options.tls_key)
        warnings += _expiry(options.tls_cert)
    if options.tls_client_ca is not None:
        _check_readable(options.tls_client_ca)
    return warnings


def _check_readable(path: str) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(path)
    except OSError as error:  # the base class of ssl.SSLError
        raise OptionError(f"{path} cannot be read as a PEM certificate: {_reason(error)}") from None


def _check_pair(cert: str, key: str) -> None:
    _check_readable(cert)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=lambda: b"")
    except OSError as error:
        if "MISMATCH" in str(getattr(error, "reason", "")):
            raise OptionError(
                f"the key {key} does not belong to the certificate {cert}",
                hint="--tls-cert and --tls-key must name two that were made together.",
            ) from None
        raise OptionError(f"{key} must be a private key without a passphrase, PEM: {_reason(error)}") from None


def _reason(error: OSError) -> str:
    reason = getattr(error, "reason", None) or error.strerror or "it contains none"
    return str(reason).lower().replace("_", " ")


def _expiry(cert: str) -> list[str]:
    # Python has no public way to read a certificate without a connection; this function is as old as ssl.
    found: dict[str, Any] = ssl._ssl._test_decode_cert(cert)  # type: ignore[attr-defined]
    left_s = ssl.cert_time_to_seconds(found["notAfter"]) - time.time()
    if left_s > _SOON_S:
        return []
    when = "has expired" if left_s <= 0 else f"expires in {left_s / 3600:.0f} hours"
    return [f"the certificate {cert} {when}: {found['notAfter']}. SIGHUP makes the server read a new one"]
