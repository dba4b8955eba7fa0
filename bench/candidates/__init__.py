"""The candidates, a module each. ``interface.py`` says what such a module holds."""
