"""Judges of two answers to a prompt, duels between models, and the agreement of judges with people.

The interface is `fedlight.evaluation.judge.Judge`. Judges follow a rule, or ask a selector, a local model or an endpoint.
`duels` and `judge_agreement` are stages of recipes; they read stored answers and votes.
"""

from fedlight.support.lazy import room_names

__getattr__ = room_names(__name__)
