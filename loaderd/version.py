"""Which loaderd this is."""

VERSION = "0.1.0"
