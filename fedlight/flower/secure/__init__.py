"""Secure aggregation: the server learns the sum of the nodes' uploads, and no single upload."""
