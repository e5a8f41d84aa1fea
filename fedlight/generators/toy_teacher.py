"""Teacher of the toy world, a text generator in place of the paper's GPT-3.5, without model or network.

It writes questions like its examples, most about another person in an area of one of them, some about any topic of the
domain, and answers them with all facts but a few. None of its texts is in the test rows.
"""

import random
import re
from collections.abc import Sequence

from fedlight.generators.endpoint import TextGenerator
from fedlight.support.checks import check_range
from fedlight.support.seeding import derive_seed
from fedlight.toy.instructions import DOMAINS, JUDGEMENTS, NUMBERS, answer, draw_questions, topics
from fedlight.toy.rules import Topic
from fedlight.toy.world import NAMES

_EXAMPLES = re.compile(r"Instruction 1: (.*)\nInstruction 2: (.*)\nProvide a new", re.DOTALL)


class ToyTeacher(TextGenerator):
    r"""Generator that answers the two prompts of `fedlight.augmentation.self_instruct.self_instruct`, and no others.

    Args:
        seed: of the world, whose facts it knows.
        novelty: share of the questions that are about any topic of the domain, in [0, 1].
        error_rate: share of the answers that are drawn at random, in [0, 1].

    Raises:
        ValueError: a share is out of range.

    Examples:
        >>> teacher = ToyTeacher(seed=0, error_rate=0)
        >>> asked = teacher.instruction("which covers more ?\nanna bread", "covers more which ?\nben bread", draw=0)
        >>> topic_of(asked)[0], teacher.response(asked, draw=0) == answer(0, *topic_of(asked))
        ('kitchen', True)
    """

    def __init__(self, seed: int = 0, novelty: float = 0.2, error_rate: float = 0.1) -> None:
        check_range("novelty", novelty, 0, 1)
        check_range("error_rate", error_rate, 0, 1)
        self.seed, self.novelty, self.error_rate = seed, novelty, error_rate
        self._answers = 0

    def complete(self, prompts: Sequence[str], draw: int = 0) -> list[str]:
        self._answers += len(prompts)
        return [self._complete_one(prompt, draw) for prompt in prompts]

    def usage(self) -> dict[str, int]:
        return {"answers": self._answers}

    def instruction(self, first: str, second: str, draw: int) -> str:
        """Return a new question in one line, like two examples, by ``draw``; empty where these are none of the world."""
        rng = random.Random(derive_seed(self.seed, "toy", "teacher asks", draw, first, second))
        shown = topic_of(rng.choice((first, second))) or topic_of(first) or topic_of(second)
        if shown is None:
            return ""
        domain, (area, _) = shown
        topic = (area, rng.choice(NAMES))
        if rng.random() < self.novelty:
            topic = rng.choice(topics(domain))
        (row,) = draw_questions("public", 1, rng, self.seed, domain, topic)
        return f"{row['instruction']} {row['input']}"

    def response(self, text: str, draw: int) -> str:
        """Return an answer to a question; empty for another text."""
        rng = random.Random(derive_seed(self.seed, "toy", "teacher answers", draw, text))
        topic = topic_of(text)
        if topic is None:
            return ""
        if rng.random() < self.error_rate:
            return f"{rng.choice(JUDGEMENTS)} {rng.choice(NUMBERS)}"
        return answer(self.seed, *topic)

    def _complete_one(self, prompt: str, draw: int) -> str:
        examples = _EXAMPLES.search(prompt)
        if examples:
            return self.instruction(examples[1], examples[2], draw)
        _, mark, asked = prompt.rpartition("Instruction: ")
        return self.response(asked, draw) if mark else ""


def topic_of(text: str) -> tuple[str, Topic] | None:
    r"""Return domain and topic of a question; None for another text.

    Examples:
        >>> topic_of("kindly which covers more ?\nben bakes pies . anna bread")
        ('kitchen', ('bread', 'anna'))
        >>> topic_of("YOUR SUMMARY ? ben bakes pies .") is None
        True
    """
    words = text.split()
    for domain, (areas, marks) in DOMAINS.items():
        if set(marks) <= set(words) and words[-1] in areas and words[-2] in NAMES:
            return domain, (words[-1], words[-2])
    return None
