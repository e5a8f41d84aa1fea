"""Judges of two answers to a prompt, duels between models, and the agreement of judges with people.

The interface is `fedlight.evaluation.judge.Judge`. Judges follow a rule, or ask a selector, a local model or an endpoint.
`duels` and `judge_agreement` are stages of recipes; they read stored answers and votes.
"""

from fedlight.support.lazy import lazy_names

_FILES = {
    "ChatJudge": "chat_judge",
    "FactJudge": "rule_judges",
    "LengthJudge": "rule_judges",
    "LocalJudge": "local_judge",
    "OracleJudge": "rule_judges",
    "SelectorJudge": "selector_judge",
}

__all__ = [*_FILES]
__getattr__ = lazy_names(__name__, _FILES)
