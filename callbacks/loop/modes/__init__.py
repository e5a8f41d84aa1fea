"""Modes of a federation, the values of ``federated.mode``: whose visits make up a round, and from which model they start.

`synchronous` asks a cohort in every round and waits for it; `buffered` lets the server step with every so many arrivals.
"""
