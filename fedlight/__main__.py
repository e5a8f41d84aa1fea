"""``python -m fedlight``."""

from fedlight.cli import main

main()
