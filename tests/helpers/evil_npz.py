"""An npz that states what it does not hold."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Mapping

CENTRAL = {"method": (10, "<H"), "stored": (20, "<I"), "inflated": (24, "<I"), "offset": (42, "<I")}
"""Where in a directory's entry (behind ``PK\\1\\2``) some of its numbers are, and how."""
END = {"entries": (10, "<H"), "bytes": (12, "<I"), "offset": (16, "<I")}
"""The same of the end of the directory (``PK\\5\\6``)."""


def npy(shape: str, data: bytes, descr: str = "|u1", length: int | None = None, version: int = 1) -> bytes:
    """An array of numpy's whose header says any shape. ``length``: what it says of its own length."""
    header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    stated = len(header) if length is None else length
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<H" if version == 1 else "<I", stated) + header + data


def npz(arrays: Mapping[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    """A zip of such arrays."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, data in arrays.items():
            archive.writestr(f"{name}.npy", data)
    return out.getvalue()


def stating(data: bytes, name: str, value: int, of_end: bool = False) -> bytes:
    """An npz whose last entry, or whose directory, states another number."""
    at, kind = (END if of_end else CENTRAL)[name]
    place = data.rindex(b"PK\x05\x06" if of_end else b"PK\x01\x02") + at
    changed = bytearray(data)
    struct.pack_into(kind, changed, place, value & ((1 << 8 * struct.calcsize(kind)) - 1))
    return bytes(changed)
