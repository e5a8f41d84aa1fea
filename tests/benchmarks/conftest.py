"""Finds the package beside the measurements; behind all others, as these have names of packages, such as coverage.py."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
