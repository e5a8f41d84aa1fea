"""Visits: messages to a client and back, its local work, and its contribution to the round."""
