"""Certificates and tokens, checked at the start, with what is wrong with them in words."""

from __future__ import annotations

import ssl
import time
from typing import Any

from loaderd.errors import OptionError
from loaderd.serve.options import HttpOptions

_SOON_S = 7 * 86_400
_SHORT_TOKEN = 16


def check_secrets(options: HttpOptions, tokens: list[str]) -> list[str]:
    """Check the certificates and the ``tokens``. Returns warnings; raises OptionError if they cannot be used."""
    warnings = []
    if tokens and (shortest := min(map(len, tokens))) < _SHORT_TOKEN:
        warnings.append(
            f"a token has {shortest} characters and could be guessed; {_SHORT_TOKEN} or more are better: "
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


def expiry_of(cert: str) -> float:
    """When a certificate, in a PEM file, expires, as a Unix time."""
    return float(ssl.cert_time_to_seconds(_not_after(cert)))


def _not_after(cert: str) -> str:
    # Python has no public way to read a certificate without a connection; this function is as old as ssl.
    found: dict[str, Any] = ssl._ssl._test_decode_cert(cert)  # type: ignore[attr-defined]
    return str(found["notAfter"])


def _expiry(cert: str) -> list[str]:
    left_s = expiry_of(cert) - time.time()
    if left_s > _SOON_S:
        return []
    when = "has expired" if left_s <= 0 else f"expires in {left_s / 3600:.0f} hours"
    return [f"the certificate {cert} {when}: {_not_after(cert)}. SIGHUP makes the server read a new one"]
