"""Synthesis: training data that clients generate for themselves, its filters, its record and the datamodule that serves it.

Knows instructions, text and the model's interface `AnswersPrompts`; algorithms drive it through `SynthesizesData`.
"""

from fedlight.support.lazy import lazy_names

_FILES = {
    "SyntheticInstructionDataModule": "datamodule",
    "Synthesis": "synthesis",
    "Candidate": "synthesis",
    "SelfGeneration": "self_generation",
    "SelfGenerationPrompts": "prompts",
    "PseudoResponses": "pseudo_responses",
    "SubstituteRows": "substitute_rows",
}

__all__ = [*_FILES]
__getattr__ = lazy_names(__name__, _FILES)
