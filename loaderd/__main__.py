"""``python -m loaderd`` is the command ``loaderd``."""

from loaderd.cli.main import main

if __name__ == "__main__":
    main()
