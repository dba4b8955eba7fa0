"""The certificates that a consumer shows and trusts when it speaks TLS with a server on another machine."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields

from loaderd.errors import OptionError
from loaderd.options import as_absolute, is_path, require


@dataclass(frozen=True)
class TLS:
    """Paths of PEM files, for ``loaderd.connect(…, tls=…)``. Raises OptionError where they do not fit together.

    ``ca``: the certificates that must have signed the server's; None: those that the system trusts. ``cert`` and
    ``key``: the consumer's own, where the server asks for one (mTLS). ``server_name``: the name that must stand in
    the server's certificate, where it is not the host of the address.
    """

    ca: str | os.PathLike[str] | None = None
    cert: str | os.PathLike[str] | None = None
    key: str | os.PathLike[str] | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            is_name = field.name == "server_name" and isinstance(value, str) and bool(value)
            require(value is None or is_name or is_path(value), f"TLS.{field.name}", "text or None", value)
            if value is not None and field.name != "server_name":
                object.__setattr__(self, field.name, as_absolute(value, f"TLS.{field.name}"))
        if (self.cert is None) != (self.key is None):
            raise OptionError(f"TLS.cert and TLS.key belong together, got cert={self.cert!r} and key={self.key!r}")
