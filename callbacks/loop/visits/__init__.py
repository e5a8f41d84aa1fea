"""Visits: what is sent to a client and back, its local work, and what it contributes to the round."""
