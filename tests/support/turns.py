"""Turns of a benchmark's ways that nobody waits for."""


class Counting:
    """Counts the rounds that a way has begun, and how often it was told to stop."""

    rounds = 0
    stopped = 0

    def next_round(self):
        self.rounds += 1

    def stop(self):
        self.stopped += 1
