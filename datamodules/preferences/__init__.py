"""Preference pairs, prompts and completions."""
