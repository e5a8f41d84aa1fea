"""Reasons of ``visits.csv`` why a client took no part in a round; without torch, so that a report needs none."""

REASONS = ("absent", "out_of_memory", "left", "late", "surplus")
"""Reasons why a client did not finish a round, in the order in which they are checked."""

NO_PART = (*REASONS, "diverged")  # `fedlight.federation.state.DIVERGED`, whose file needs torch
"""Reasons why a client did not take part: it did not finish, or what it trained was not finite."""
