"""Reasons of ``visits.csv`` why a client took no part in a round; without torch, so that a report needs none."""

REASONS = ("absent", "out_of_memory", "left", "late", "surplus")
"""Reasons why a client did not finish a round, in the order in which they are checked."""

LEFT_OUT = "left_out"
"""Reason of a client whose update was over `federated.limits` and was dropped."""

TOO_FEW = "too_few"
"""Reason of a client of a round in which its aggregation, such as Krum, needs more updates than have arrived."""

DIVERGED = "diverged"  # `fedlight.federation.client.DIVERGED`, whose file needs torch
NO_PART = (*REASONS, DIVERGED, LEFT_OUT, TOO_FEW)
"""Reasons why a client did not take part: it did not finish, what it trained was not finite, it was over a limit, or the
round had too few updates."""

LARGE_NORM, CLIPPED, LARGE_SHARE, CAPPED = "large_norm", "clipped", "large_share", "capped"
"""What a client was over that took part all the same, joined by ``+``; the second and the last were held to a limit."""


def took_part(reason: str) -> bool:
    """Return whether a client with this reason took part in the round.

    Examples:
        >>> [took_part(reason) for reason in ("", "late", "clipped", "capped+clipped", "dropped: it has failed")]
        [True, False, True, True, False]
    """
    return {*reason.split("+")} <= {"", LARGE_NORM, CLIPPED, LARGE_SHARE, CAPPED}
