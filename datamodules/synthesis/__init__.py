"""Synthetic training data that clients make."""
