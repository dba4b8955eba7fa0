"""Candidates that need TensorFlow and nothing else; ``loaderd.bench.interface`` says what one holds."""
