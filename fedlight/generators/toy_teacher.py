"""The toy world's teacher as a text generator: what GPT-3.5 is to Self-Instruct in the paper, without model or network."""

import re
from collections.abc import Sequence

from fedlight.generators.endpoint import TextGenerator
from fedlight.toy.teacher import Teacher

_EXAMPLES = re.compile(r"Instruction 1: (.*)\nInstruction 2: (.*)\nProvide a new", re.DOTALL)


class ToyTeacher(TextGenerator):
    """Answers the two prompts of `fedlight.augmentation.self_instruct.prompts`; another prompt has no answer.

    Args:
        seed, novelty, error_rate: see `fedlight.toy.teacher.Teacher`.
    """

    def __init__(self, seed: int = 0, novelty: float = 0.2, error_rate: float = 0.1) -> None:
        self.seed, self.novelty, self.error_rate = seed, novelty, error_rate
        self._teacher = Teacher(seed, novelty, error_rate)
        self._answers = 0

    def complete(self, prompts: Sequence[str], draw: int = 0) -> list[str]:
        """See `TextGenerator`; the answer to a prompt is a function of it, the settings and ``draw``."""
        self._answers += len(prompts)
        return [self._one(prompt, draw) for prompt in prompts]

    def usage(self) -> dict[str, int]:
        """Answers given."""
        return {"answers": self._answers}

    def _one(self, prompt: str, draw: int) -> str:
        examples = _EXAMPLES.search(prompt)
        if examples:
            return self._teacher.instruction(examples[1], examples[2], draw)
        _, found, asked = prompt.rpartition("Instruction: ")
        return self._teacher.response(asked, draw) if found else ""
