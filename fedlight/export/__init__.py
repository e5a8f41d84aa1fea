"""A trained model taken out of its run: as an adapter, one whole model or a GGUF file, with a card, or onto the hub."""
