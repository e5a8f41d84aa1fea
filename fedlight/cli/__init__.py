"""Command line: ``fedlight`` with its commands, each imported when it is called."""
