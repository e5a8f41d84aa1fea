"""Instruction data, with or without public rows added to them."""
