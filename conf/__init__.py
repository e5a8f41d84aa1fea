"""The YAML files of fedlight, shipped as package data; ``fedlight.conf.path("demo.yaml")`` finds one."""

from pathlib import Path


def path(name: str) -> Path:
    """The file ``name`` (with its ending, relative to this folder); the caller checks that it exists."""
    return Path(__file__).resolve().parent / name
