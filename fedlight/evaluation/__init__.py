"""Metrics, judges and win rates."""
