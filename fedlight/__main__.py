"""``python -m fedlight``."""

from fedlight.cli.main import main

main()
