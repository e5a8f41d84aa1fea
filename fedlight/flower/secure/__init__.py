"""Secure aggregation: the server learns the sum of what the nodes send, and no single upload."""
