"""Partitions of examples over clients."""
