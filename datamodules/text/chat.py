"""Conversations in a tokenizer's own chat template: where an answer begins, and which tokens of a text are taught.

A model learns its answers, each up to the token that ends its turn. Where the template marks answers (``{% generation %}``)
the marks say what an answer is, otherwise the difference between the texts of the conversation with and without it.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fedlight.datamodules.text.tokens import encode, end_ids
from fedlight.pretrained.openings import ASKED, chat_starts, opening_ids, render_turns

ANSWERED = "fedlight answers"
MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
REMEDY = "set the template to alpaca or a text of your own, or give a tokenizer whose chat_template does"

TURN = {"role", "content"}
Span = tuple[int, int]
"""First character, and the one after the last."""


@dataclass(frozen=True)
class Chat:
    """Chat template of a tokenizer, taken apart by a conversation of one question and one answer."""

    tokenizer: Any = field(repr=False, compare=False)  # a fast tokenizer
    before: str  # text before the question
    after: str  # text between the question and the place where a model goes on
    joint: str = ""  # text that the template puts before an answer after that place, such as a blank
    closing: str = ""  # text after an answer at the end of a conversation
    lead: int = 0  # characters of ``joint`` that are not taught
    stop: int = 0  # characters of ``closing`` that are taught, up to the end token
    # special tokens; one of them ends an answer
    ends: frozenset[int] = field(default=frozenset(), repr=False)
    fault: str = ""  # why a model cannot learn answers in this template; "": it can

    @classmethod
    def of(cls, tokenizer: Any) -> "Chat":
        """Take the tokenizer's chat template apart.

        Raises:
            ValueError: there is none, or it does not show a question.
        """
        if not tokenizer.chat_template:
            raise ValueError(
                f"tokenizer {tokenizer.name_or_path!r} has no chat template, as base models have none: set the template to "
                "alpaca or a text of your own, or the model to one that was tuned on instructions"
            )
        name = f"the chat template of tokenizer {tokenizer.name_or_path!r}"
        asked = _render(tokenizer, [_turn("user", ASKED)])
        before, question, after = asked.partition(ASKED)
        if not question:
            raise ValueError(f"{name} does not show a question: {REMEDY}")
        if opening_ids(tokenizer) and not chat_starts(tokenizer):
            raise ValueError(
                f"{name} begins with the question itself, without the token that opens all other texts: {REMEDY}"
            )
        return cls(tokenizer, before, after)._with_answer(name, asked)

    def _with_answer(self, name: str, asked: str) -> "Chat":
        turns = [_turn("user", ASKED), _turn("assistant", ANSWERED)]
        full = _render(self.tokenizer, turns, ask=False)
        joint, answered, closing = full.removeprefix(asked).partition(ANSWERED)
        if not answered or not full.startswith(asked):
            return replace(self, fault=f"{name} does not show a question followed by its answer: {REMEDY}")
        if not self.tokenizer.is_fast:
            return replace(self, fault=f"{name} needs a fast tokenizer: save it with a tokenizer.json")
        [encoding] = encode(self.tokenizer, [closing])
        ends = end_ids(self.tokenizer)
        stops = [
            last for index, (_, last) in zip(encoding.ids, encoding.offsets, strict=True) if index in ends
        ]
        if not stops:
            return replace(
                self,
                fault=f"{name} has no token that ends an answer, so a model would not learn to end: {REMEDY}",
            )
        chat = replace(self, joint=joint, closing=closing, stop=stops[0], ends=ends)
        if not chat.marks:
            return chat
        if len(marked := chat._marked(turns)) != 1:
            return replace(self, fault=f"{name} marks {len(marked)} parts of one answer: {REMEDY}")
        [(first, last)] = marked
        # Marks may leave the end token out, and a model that is not taught it never ends.
        return replace(chat, lead=first - len(asked), stop=max(last - len(full) + len(closing), stops[0]))

    def answerable(self) -> "Chat":
        """Return this; raise ValueError where the template cannot show an answer after its question."""
        if self.fault:
            raise ValueError(self.fault)
        return self

    @property
    def marks(self) -> bool:
        """Whether the template marks the answers of the model."""
        return bool(MARKS.search(self.tokenizer.get_chat_template()))

    def render(self, turns: Sequence[Mapping[str, str]]) -> str:
        """Return the text of a conversation up to the place where the model goes on."""
        return _render(self.tokenizer, turns)

    def check(self, text: str, turns: Sequence[Mapping[str, str]], answer: str) -> None:
        """Raise ValueError unless a text is these turns with this answer: a template may depend on their contents.

        Warn of a turn that the template leaves out.
        """
        if text != _render(self.tokenizer, [*turns, _turn("assistant", answer)], ask=False):
            raise ValueError(self._rewritten(answer))
        # Thoughts of earlier answers may be left out.
        for role in {turn["role"] for turn in turns if turn["content"].strip() not in text} - {"assistant"}:
            from lightning.pytorch.utilities import rank_zero_warn  # here: reports read templates without it

            rank_zero_warn(
                f"the chat template of tokenizer {self.tokenizer.name_or_path!r} does not show some texts of the role "
                f"{role!r} as they are, so nothing is learned from these: set the template to a text of your own"
            )

    def earlier_answers(self, turns: Sequence[Mapping[str, str]], answer: str) -> list[Span]:
        """Return the characters that are taught of earlier answers in a conversation that ends with ``answer``.

        Raises:
            ValueError: the template does not show an answer as it is, or not its end token.
        """
        whole = [*turns, _turn("assistant", answer)]
        full = _render(self.tokenizer, whole, ask=False)
        if self.marks:
            marked = self._marked(whole)[:-1]
            end = self.closing[: self.stop]
            # Marks may leave the end token out, see `_with_answer`.
            return [(first, last + len(end) * full.startswith(end, last)) for first, last in marked]
        return [
            self._find(full, turns[:place], turn["content"])
            for place, turn in enumerate(turns)
            # A greeting before any question is no answer.
            if turn["role"] == "assistant" and any(earlier["role"] == "user" for earlier in turns[:place])
        ]

    def taught(self, encoding: Any, spans: Sequence[Span]) -> np.ndarray:
        """Return 1 for each token that has characters of a span, else 0, ``(tokens,)``.

        Raises:
            ValueError: the last taught token of a span does not end an answer.
        """
        starts, ends = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
        mask = np.zeros(len(starts), dtype=np.int32)  # [tokens]
        for first, last in spans:
            inside = np.flatnonzero((ends > first) & (starts < last))  # a token across a border, too
            if not len(inside) or encoding.ids[inside[-1]] not in self.ends:
                raise ValueError("an answer has no end token, so a model would not learn to end: " + REMEDY)
            mask[inside] = 1
        return mask

    def _find(self, full: str, turns: Sequence[Mapping[str, str]], answer: str) -> Span:
        """Return the taught characters of the answer to these turns in the text of the whole conversation."""
        first, end = len(asked := self.render(turns)), self.closing[: self.stop]
        for joint in (self.joint, ""):
            if full.startswith(f"{asked}{joint}{answer}{end}"):
                return first, first + len(joint) + len(answer) + len(end)
        raise ValueError(self._rewritten(answer))

    def _marked(self, turns: Sequence[Mapping[str, str]]) -> list[Span]:
        """Return the characters of each answer that the template marks."""
        options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        encoded = render_turns(self.tokenizer, turns, ask=False, **options)
        [encoding] = encode(self.tokenizer, [_render(self.tokenizer, turns, ask=False)])
        mask = np.array([0, *encoded["assistant_masks"], 0])  # each answer has two borders
        borders = np.flatnonzero(np.diff(mask)).reshape(-1, 2)
        return [(encoding.offsets[first][0], encoding.offsets[last - 1][1]) for first, last in borders]

    def _rewritten(self, answer: str) -> str:
        return (
            f"the chat template of tokenizer {self.tokenizer.name_or_path!r} does not show the answer {answer[:40]!r} "
            "unchanged at its place and followed by its end token: leave this row out, set taught_turns to last, or set the "
            "template to a text of your own"
        )


def write_turns(turns: Sequence[Mapping[str, str]]) -> str:
    """Return turns with ``role`` and ``content`` as the text of a row's field.

    Examples:
        >>> write_turns([{"role": "user", "content": "Hi"}])
        '[{"role": "user", "content": "Hi"}]'
    """
    return json.dumps([_turn(turn["role"], turn["content"]) for turn in turns], ensure_ascii=False)


def read_turns(text: str) -> list[dict[str, str]]:
    """Return the turns that `write_turns` has written; another text is one turn of the user.

    Examples:
        >>> read_turns('[{"role": "user", "content": "Hi"}]') == read_turns("Hi")
        True
    """
    try:
        turns = json.loads(text)
    except ValueError:  # not JSON: a plain text
        turns = None
    if (
        isinstance(turns, list)
        and turns
        and all(isinstance(turn, dict) and {*turn} == TURN for turn in turns)
    ):
        return turns
    return [_turn("user", text)]


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _render(tokenizer: Any, turns: Sequence[Mapping[str, str]], ask: bool = True) -> str:
    from jinja2 import TemplateError

    try:
        text: str = render_turns(tokenizer, turns, ask)
    except TemplateError as error:
        roles = ", ".join(turn["role"] for turn in turns)
        raise ValueError(
            f"the chat template of tokenizer {tokenizer.name_or_path!r} refuses a conversation of {roles} ({error}): leave "
            "such rows out, or set the template to a text of your own"
        ) from None
    return text
