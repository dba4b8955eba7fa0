"""The modules of bench/ are scripts beside each other; they find one another as they do when run."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
