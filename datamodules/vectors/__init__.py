"""Embeddings, vector indexes and retrieval."""
