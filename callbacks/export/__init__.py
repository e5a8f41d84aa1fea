"""Adapters and predictions written to files."""
