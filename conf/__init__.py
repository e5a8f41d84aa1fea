"""The YAML files of fedlight, shipped as package data; ``fedlight.conf.path("demo.yaml")`` finds one."""

from pathlib import Path


def configs() -> list[str]:
    """Names of the configs of Lightning commands; those of methods alone, which others extend, come last."""
    folder = Path(__file__).resolve().parent
    return [
        file.relative_to(folder).as_posix()
        for pattern in ("*.yaml", "methods/*.yaml")
        for file in sorted(folder.glob(pattern))
    ]


def path(name: str) -> Path:
    """The file ``name`` (with its ending, relative to this folder); the caller checks that it exists."""
    return Path(__file__).resolve().parent / name
