"""A first config for data that fedlight has never seen: ``fedlight init DATA`` guesses the settings and writes one YAML.

Guesses are pure functions of rows (`columns`, `roles`), of their number or of a tokenizer (`settings`); each says why, and
whether it is sure. `draft` puts them together.
"""
