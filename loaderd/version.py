"""Which loaderd this is. The only place that says so: setup.cfg reads it from here."""

VERSION = "0.2.0"
