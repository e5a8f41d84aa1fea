"""The embedded default: a small synthetic world with known client tastes, and a tiny language model that can read it."""

from pathlib import Path

from fedlight.toy.votes import rows

MODEL = Path(__file__).parent / "model"

__all__ = ["MODEL", "rows"]
