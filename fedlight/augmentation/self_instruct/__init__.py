"""Self-Instruct: new instructions written by a generator."""
