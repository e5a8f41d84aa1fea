"""The first tokens of a text, and conversations in the tokenizer's chat template.

A text is encoded with the special tokens that it holds and no others. If the tokenizer opens every text with a token, or
several as GLM's, these go before it. A text of the chat template is complete, as in ``apply_chat_template(tokenize=True)``:
it holds them or does without.
"""

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

ASKED, SYSTEM = "fedlight asks", "fedlight decrees"
"""Texts of trial conversations, which no chat template holds."""
DAY = "26 Jul 2024"
"""``date_string`` of the templates that show a day, Llama's among them: texts must not depend on today's."""


def opening_ids(tokenizer: Any) -> list[int]:
    """Return the tokens that the tokenizer puts before every text; they need not be its ``bos_token``."""
    plain = tokenizer("x", add_special_tokens=False)["input_ids"]
    return [*takewhile(lambda token: token not in plain, tokenizer("x")["input_ids"])]


def openings(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids before each text: the opening tokens, none where the text is one of the chat template."""
    opening = opening_ids(tokenizer)  # these texts have their opening
    starts = chat_starts(tokenizer) if opening else ()
    return [[] if starts and text.startswith(starts) else opening for text in texts]


def chat_starts(tokenizer: Any) -> tuple[str, ...]:
    """Return the beginnings of the chat template's texts, one for conversations with a system message; () without any."""
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        return ()
    starts: dict[str, None] = {}
    user, system = {"role": "user", "content": ASKED}, {"role": "system", "content": SYSTEM}
    for turns, first in (([user], ASKED), ([system, user], SYSTEM)):
        try:
            start, _, _ = render_turns(tokenizer, turns).partition(first)
        except TemplateError:  # of a template without system messages
            continue
        starts[start] = None
    return tuple(start for start in starts if start)


def render_turns(tokenizer: Any, turns: Sequence[Any], ask: bool = True, **options: Any) -> Any:
    """Return a conversation in the tokenizer's chat template; ``ask``: it ends where an answer begins."""
    options = {"tokenize": False, "date_string": DAY, **options}
    return tokenizer.apply_chat_template(list(turns), add_generation_prompt=ask, **options)
