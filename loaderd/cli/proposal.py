"""A proposal of a schema, as Python text, from a sample of records."""

from __future__ import annotations

import json

from loaderd.cli.sample import FeatureSummary, Sample
from loaderd.errors import OptionError


def propose(sample: Sample) -> str:
    """A module with a ``schema``. A feature without a fixed length is left out, with a comment that says why.

    Raises OptionError if none is left.
    """
    features, fields, left_out = [], [], []
    parsed = len(sample.sizes) - len(sample.faults)
    for name, found in sample.features.items():
        problem = _problem(found)
        if problem:
            left_out.append(f"# {name!r} is left out: {problem}.")
            continue
        missing = parsed - found.records
        stored, delivered, remark = _lines(name, found, missing > 0)
        note = [remark] if remark else []
        if missing:
            note.append(f"{missing} of {parsed} records lack it and get the default")
        features += [f"        # {line}." for line in note]
        features.append(f"        {quoted(name)}: {stored},")
        fields.append(f"        {quoted(name)}: {delivered},")
    if not features:
        why = " ".join(left_out) or "the records hold no features."
        raise OptionError(f"no feature of the first {len(sample.sizes)} records has a fixed length: {why}")
    text = [f'"""A schema proposed by loaderd from {len(sample.sizes)} records. Check which bytes are bits."""']
    text += ["", "import loaderd", "", *left_out, "schema = loaderd.Schema(", "    features={", *features, "    },"]
    return "\n".join([*text, "    fields={", *fields, "    },", ")"]) + "\n"


def _problem(found: FeatureSummary) -> str:
    """Why a feature has no place in a row of fixed size; "" if it has one."""
    if len(found.kinds) > 1:
        return f"it is of several types, {' and '.join(sorted(found.kinds))}"
    (kind,) = found.kinds
    if len(found.lengths) > 1:
        return f"its lists have {min(found.lengths)} to {max(found.lengths)} values"
    if found.lengths == {0}:
        return "its lists are empty"
    if kind == "bytes" and found.lengths != {1}:
        return f"it has {min(found.lengths)} bytes values, where one is read"
    if len(found.byte_lengths) > 1:
        return f"its values have {min(found.byte_lengths)} to {max(found.byte_lengths)} bytes"
    return "its values are empty" if found.byte_lengths == {0} else ""


def _lines(name: str, found: FeatureSummary, needs_default: bool) -> tuple[str, str, str]:
    """(stored feature, field, remark) of a feature of fixed length."""
    (kind,), (length,) = found.kinds, found.lengths
    if kind != "bytes":
        stored = "Int64" if kind == "int64" else "Float"
        options = [f"({length},)"] * (length > 1) + ["default=0"] * needs_default
        return f"loaderd.{stored}({', '.join(options)})", f"loaderd.Array({quoted(name)})", ""
    (num_bytes,) = found.byte_lengths
    if found.is_text:
        default = ', default=b""' if needs_default else ""
        return f'loaderd.Raw("S{num_bytes}"{default})', f"loaderd.Array({quoted(name)})", ""
    bits = 8 * num_bytes
    default = f", default=bytes({num_bytes})" if needs_default else ""
    remark = f'Bits, or numbers: then loaderd.Raw("uint8", ({num_bytes},)) and loaderd.Array({quoted(name)})'
    return f"loaderd.PackedBits({bits}{default})", f"loaderd.Bits({quoted(name)}, shape=({bits},))", remark


def quoted(name: str) -> str:
    """A literal of Python in double quotes, as formatters want them."""
    return json.dumps(name, ensure_ascii=False)  # else a letter beyond U+FFFF became two surrogates
