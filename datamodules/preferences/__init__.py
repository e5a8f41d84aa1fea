"""Preferences: votes of clients, prompts to answer, pairs of completions and their labels by selectors.

Knows rows, text, clients and the federated datamodule; steps of recipes and judges use the labels.
"""

from fedlight.support.lazy import lazy_names

_FILES = {
    "PreferenceDataModule": "datamodule",
    "PromptDataModule": "prompts",
    "CompletionPairDataModule": "completions",
}

__all__ = [*_FILES]
__getattr__ = lazy_names(__name__, _FILES)
