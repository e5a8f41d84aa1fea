"""Privacy attacks on the global model and on uploads."""
