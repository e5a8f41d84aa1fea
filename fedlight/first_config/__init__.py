"""A first config for data that fedlight has never seen: ``fedlight init DATA`` guesses the settings and writes one YAML.

Guesses are pure functions of rows (`columns`, `votes`, `instructions`, `clients`, `sizes`) or of a tokenizer (`words`); each
says why, and whether it is sure. `draft` puts them together, `text` writes the YAML.
"""
