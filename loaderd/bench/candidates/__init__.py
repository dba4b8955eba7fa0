"""Candidates that need nothing but loaderd, a module each; ``loaderd.bench.interface`` says what one holds."""
