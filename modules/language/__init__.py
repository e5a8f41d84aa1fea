"""The language model under all modules: base, adapters, generation, scoring."""
