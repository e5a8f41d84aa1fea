"""Generators of text: endpoints, local models and saved answers."""
