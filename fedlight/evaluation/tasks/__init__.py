"""Benchmarks of a language model, one file each; ``task`` is their base, ``result`` their scores.

A task gets its rows and prompts from a datamodule's source, and its answers from any model of ``model``'s protocols.
"""

from fedlight.support.lazy import lazy_names

_FILES = {
    "Completions": "sampling",
    "ExactMatch": "exact_match",
    "GSM8K": "gsm8k",
    "HumanEval": "human_eval",
    "MultipleChoice": "multiple_choice",
    "Sampling": "sampling",
    "Sentiment": "sentiment",
    "Task": "task",
}

__all__ = [*_FILES]
__getattr__ = lazy_names(__name__, _FILES)
