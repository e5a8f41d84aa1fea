"""Prompt templates: texts with named slots; one slot may be cut when the prompt is too long.

The summarization and question-answering templates are those of Figure 4 in Wu et al., "Towards Federated RLHF with
Aggregated Client Preference for LLMs" (FedBiscuit), ICLR 2025, https://arxiv.org/abs/2407.03038, word for word, with the
slots ``output_A`` and ``output_B`` named ``response_a`` and ``response_b``; ``instruction`` of SHP keeps its name. The two
question-answering templates are Alpaca's (Taori et al. 2023, https://github.com/tatsu-lab/stanford_alpaca).

``alpaca_joined`` is Alpaca's form without input, with the input after the instruction and a blank. It is the format of
OpenFedLLM (Ye et al. 2024, https://arxiv.org/abs/2402.06954, https://github.com/rui-ye/OpenFedLLM) and of Wang et al.
(FedDCA, https://arxiv.org/abs/2409.20135, appendix A.3.1), without the blank at the end of the instruction's line.

``chat`` is the chat template of the model's tokenizer, for models that were tuned on instructions; ``chat:NAME`` and
``chat:TEXT`` give the user's message. Else the message is the conversation in the column ``messages`` if there is one, or
the instruction and its input, the prompt of a preference, or a question about two answers. The last line of a
comparison, such as ``CHOICE:``, begins the assistant's answer.
"""

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from string import Formatter
from typing import Any, Literal

from fedlight.datamodules.text.chat import Chat, read_turns
from fedlight.datamodules.text.tokens import Parts
from fedlight.evaluation.tasks.task import continuation

CHAT = "chat"
MESSAGES = "messages"
"""Slot of a whole conversation, whose text is that of `fedlight.datamodules.text.chat.write_turns`."""
ANSWER_SLOTS = ("response_a", "response_b")
MARKS = ("#", "<", "[")
WORD = re.compile(r"\w")
STOP_CHARACTERS = 40
TRIM_ORDER = ("post", "input", "prompt", "instruction", MESSAGES)

ALPACA = """Below is an instruction that describes a task, paired with an input that provides further context. \
Write a response that appropriately completes the request.

### Instruction:
{instruction}

### Input:
{input}

### Response:"""

ALPACA_NO_INPUT = """Below is an instruction that describes a task. \
Write a response that appropriately completes the request.

### Instruction:
{instruction}

### Response:"""

COMPARISON = """Which answer is better?
QUESTION: {prompt}
ANSWER A: {response_a}
ANSWER B: {response_b}
CHOICE:"""

TEXTS = {
    "alpaca": ALPACA,
    "alpaca_no_input": ALPACA_NO_INPUT,
    "alpaca_joined": ALPACA_NO_INPUT.replace("{instruction}", "{instruction} {input}"),
    "tldr_generation": """Below is an instruction that describes a task, paired with an input that provides \
further context. Write a response that appropriately completes the request.

### Instruction:
Summarize the following Reddit post in a paragraph of 50 words or less.

### Input:
SUBREDDIT: r/{subreddit}
TITLE: {title}
POST: {post}

### Response:""",
    "tldr_choice": """Below is a forum post followed by two summaries. Pick a more precise and concise one that summarizes \
the most important points in the given forum post, without including unimportant or irrelevant details. \
State your choice with a single capital letter, i.e., "A" if SUMMARY A is better, "B" if SUMMARY B is better.

### SUBREDDIT: r/{subreddit}
### TITLE: {title}
### POST: {post}
### SUMMARY A: {response_a}
### SUMMARY B: {response_b}
### YOUR CHOICE:""",
    "shp_choice": """Below is a query followed by two responses. Pick a helpful response that is precise, concise, \
and casual. State your choice with a single capital letter, i.e., "A" if RESPONSE A is better, "B" if RESPONSE B is \
better.

### QUERY: {instruction}
### RESPONSE A: {response_a}
### RESPONSE B: {response_b}
### YOUR CHOICE:""",
    "argument_choice": """Below is a claim followed by two arguments for it. Pick the more convincing argument. \
State your choice with a single capital letter, i.e., "A" if ARGUMENT A is more convincing, "B" if ARGUMENT B is \
more convincing.

### CLAIM: {prompt}
### ARGUMENT A: {response_a}
### ARGUMENT B: {response_b}
### YOUR CHOICE:""",
    "argument_generation": """Below is a claim. Write a convincing argument for it.

### CLAIM: {prompt}

### ARGUMENT:""",
}


@dataclass(frozen=True)
class Template:
    """Text with slots in braces (``{{`` for a brace itself); texts that fill a slot are never read as templates.

    Args:
        text: text of the template; of a chat that of the user's message, in `for_tokenizer` the whole.
        trim: slot that is cut at its end when the prompt is too long; None: no slot is cut.
        without: template for rows without an ``input`` (Alpaca's form without input).
        is_chat: the text goes into the chat template of a tokenizer, which `for_tokenizer` reads.
        chat: that template; None before.
        message: text of the user's message, where ``chat`` is known.
        opening: beginning of the answer, where ``chat`` is known.
    """

    text: str
    trim: str | None = None
    without: "Template | None" = None
    is_chat: bool = False
    chat: Chat | None = None
    message: str = ""
    opening: str = ""

    @classmethod
    def named(
        cls,
        name: str,
        columns: Container[str] = (),
        asks: Literal["instruction", "prompt", "choice"] = "instruction",
    ) -> "Template":
        """Return the template of a name, or the template whose text is ``name`` if that has a slot in braces.

        The slot that may be cut is the first of post, input, prompt and instruction that occurs. The content of the user's
        message of ``chat`` follows from the columns of the rows, as far as they are known, else from ``asks``.

        Raises:
            ValueError: ``name`` is neither a known name nor a text with named slots, or shows ``response_a`` or
                ``response_b`` where ``asks`` is no choice.

        Examples:
            >>> Template.named("Claim: {prompt}").trim
            'prompt'
            >>> Template.named("alpaca").slots
            ('instruction', 'input')
            >>> Template.named("chat").slots, Template.named("chat", columns=["messages"]).slots
            (('instruction', 'input'), ('messages',))
        """
        kind, colon, message = name.partition(":")
        if kind == CHAT and (colon or kind == name):
            inner = cls.named(message.lstrip(" "), asks=asks) if colon else _default_message(columns, asks)
            return replace(inner, is_chat=True)
        text = name if "{" in name else _find_text(name)
        slots = _list_slots(text)
        if any(slot == "" for _, slot, _, _ in Formatter().parse(text)):
            raise ValueError(f"template={name!r} has {{}}, a slot without a name: name it, as in {{prompt}}")
        if asks != "choice" and (shown := next((slot for slot in slots if slot in ANSWER_SLOTS), None)):
            raise ValueError(
                f"template={name!r} has the slot {{{shown}}}, which choice_template alone fills: leave it out, or give its "
                "column another name"
            )
        trim = next((slot for slot in TRIM_ORDER if slot in slots), None)
        if name in ("alpaca", "alpaca_joined"):
            return cls(text, trim, without=cls(ALPACA_NO_INPUT, "instruction"))
        return cls(text, trim)

    def trimming(self, slot: str | None) -> "Template":
        """Return this template with another slot that may be cut, None for no slot, ``auto`` for its own.

        Raises:
            ValueError: it has no such slot.
        """
        if slot == "auto":
            return self
        if slot is not None and slot not in self.slots:
            raise ValueError(f"trim={slot!r} is no slot of the template; it has {', '.join(self.slots)}.")
        return replace(self, trim=slot)

    def uncut(self) -> "Template":
        """Return this template without a slot that may be cut."""
        return replace(self, trim=None, without=self.without and self.without.uncut())

    def for_tokenizer(self, tokenizer: Any) -> "Template":
        """Return the template that a model with this tokenizer reads: of a chat its whole text, else the same.

        Raises:
            ValueError: the tokenizer has no chat template, or one that cannot be used.
        """
        if not self.is_chat or self.chat is not None:
            return self
        return self._within(Chat.of(tokenizer))

    def _within(self, chat: Chat) -> "Template":
        message, opening = self.text, ""
        if {*ANSWER_SLOTS} <= {*_list_slots(self.text)}:
            message, _, opening = self.text.rpartition("\n")
            chat.answerable()
        before, after, joint = (escape(text) for text in (chat.before, chat.after, chat.joint))
        text = f"{before}{message.strip()}{after}{joint if opening else ''}{opening}"
        without = None if self.without is None else replace(self.without, is_chat=True)._within(chat)
        return replace(
            self, text=text, without=without, is_chat=True, chat=chat, message=message, opening=opening
        )

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the slots, in order, without those of the two answers."""
        return tuple(slot for slot in _list_slots(self.text) if slot not in ANSWER_SLOTS)

    @property
    def required(self) -> tuple[str, ...]:
        """Slots that no row may leave empty: the one that may be cut, unless ``without`` replaces it."""
        trim = (self.without or self).trim
        return () if trim is None else (trim,)

    @property
    def stops(self) -> tuple[str, ...]:
        r"""Beginnings of a next question in this form, cut to `STOP_CHARACTERS`; an answer ends before them.

        They are the template's first line, its lines with a mark and a word, and the beginnings with a colon of lines with a
        slot. The line before the answer needs a mark: a worked solution may well say "Answer:".

        Examples:
            >>> Template.named("alpaca_no_input").stops[1:]
            ('\n### Instruction:', '\n### Response:')
            >>> Template("Question: {prompt}\nAnswer:").stops
            ('\nQuestion:',)
        """
        if self.is_chat:  # the end token of a turn ends an answer
            return ()
        parts = [(literal.split("\n"), slot) for literal, slot, _, _ in Formatter().parse(self.text)]
        first = parts[0][0][0] if parts else ""
        heads = [lines[-1] for lines, slot in parts if slot]
        lines = [first] if len(first.split()) > 3 else []
        lines += [head for head in heads if ":" in head]
        lines += [line for part, _ in parts for line in part if line.startswith(MARKS) and WORD.search(line)]
        stops = [f"\n{line.rstrip()}"[:STOP_CHARACTERS] for line in lines]
        return tuple(dict.fromkeys([*stops, *(self.without.stops if self.without else ())]))

    @property
    def closing(self) -> str:
        """Text after an answer, where the tokenizer's end token does not follow instead."""
        return "" if self.chat is None else self.chat.answerable().closing

    def continuation(self, response: str, closed: bool = False) -> str:
        """Return a response as it follows its prompt in training: after a blank, or as the chat template has it.

        With ``closed``, also the end token of a chat template.
        """
        if self.chat is None:
            return continuation(self.text, response)
        chat = self.chat.answerable()
        return chat.joint + response + chat.closing[: chat.stop * closed]

    def render(self, fields: Mapping[str, str], ending: str = "") -> Parts:
        """Fill the slots and append ``ending``, which is never cut.

        Raises:
            ValueError: the template is a chat, and `for_tokenizer` has not been asked.

        Examples:
            >>> Template("POST: {post} TITLE: {title}", trim="post").render({"post": "a b c", "title": "t"})
            Parts(before='POST: ', trimmable='a b c', after=' TITLE: t')
        """
        if self.without is not None and not fields["input"].strip():
            return self.without.render(fields, ending)
        if not self.is_chat:
            return self._fill(self.text, fields, ending)
        if self.chat is None:
            raise ValueError("template=chat is known with the model's tokenizer alone: give that first")
        if self.slots == (MESSAGES,):
            return Parts(self.chat.render(self.turns(fields)) + ending, "", "")
        joint = self.chat.joint if self.opening else ""
        asked = self._fill(self.message, fields, "").stripped()
        after = f"{asked.after}{self.chat.after}{joint}{self.opening}{ending}"
        return Parts(self.chat.before + asked.before, asked.trimmable, after)

    def show(self, fields: Mapping[str, str], shots: Sequence[tuple[Mapping[str, str], str]]) -> str:
        """Return the prompt after examples with their answers: earlier turns of a chat, else texts between blank lines."""
        if self.chat is None:
            shown = [self.render(shot).text + self.continuation(answer) for shot, answer in shots]
            return "\n\n".join([*shown, self.render(fields).text])
        turns = []
        for shot, answer in shots:
            turns += [*self.turns(shot), {"role": "assistant", "content": answer}]
        return self.chat.render([*turns, *self.turns(fields)])

    def turns(self, fields: Mapping[str, str]) -> list[dict[str, str]]:
        """Return the turns of a chat before the answer: the user's message, or those of a conversation."""
        if self.slots == (MESSAGES,):
            return read_turns(fields[MESSAGES])
        if self.without is not None and not fields["input"].strip():
            return self.without.turns(fields)
        return [{"role": "user", "content": self._fill(self.message, fields, "").text.strip()}]

    def _fill(self, text: str, fields: Mapping[str, str], ending: str) -> Parts:
        parts = ["", "", ""]  # before, trimmable, after
        at = 0
        for literal, slot, _, _ in Formatter().parse(text):
            parts[at] += literal
            if slot is not None and slot == self.trim and at == 0:
                parts[1] = fields[slot]
                at = 2
            elif slot is not None:
                parts[at] += fields[slot]
        if at == 0:  # no slot to trim: the whole text is fixed
            return Parts(parts[0] + ending, "", "")
        return Parts(parts[0], parts[1], parts[2] + ending)


def _default_message(columns: Container[str], asks: str) -> Template:
    if asks == "choice":
        return Template(COMPARISON, "prompt")
    if MESSAGES in columns:
        return Template(f"{{{MESSAGES}}}", MESSAGES)
    if asks == "prompt" and "instruction" not in columns:
        return Template("{prompt}", "prompt")
    return Template("{instruction}\n\n{input}", "input", without=Template("{instruction}", "instruction"))


def escape(text: str) -> str:
    """Return fixed text as it stands in a template, where its braces are no slots."""
    return text.replace("{", "{{").replace("}", "}}")


def check_choice(template: Template) -> None:
    """Raise ValueError unless a template of comparisons has slots for both answers and ends with a colon."""
    slots = _list_slots(template.text)
    if missing := [slot for slot in ANSWER_SLOTS if slot not in slots]:
        raise ValueError(
            f"choice_template has no slot {{{missing[0]}}}; a comparison shows {{response_a}} and {{response_b}}."
        )
    if not template.text.endswith(":"):
        raise ValueError(
            f"choice_template ends with {template.text[-10:]!r}, but the choice follows ': '. End it with a colon."
        )
    if template.is_chat and "}" in template.text.rpartition("\n")[2]:
        raise ValueError(
            "choice_template=chat has a slot in its last line, which begins the assistant's answer: add a line such as "
            "CHOICE:"
        )


def check_prompt(template: Template, answers: Container[str]) -> None:
    """Raise ValueError where a prompt shows the answer that follows it; ``answers`` are the names of answers."""
    if shown := next((slot for slot in _list_slots(template.text) if slot in answers), None):
        raise ValueError(
            f"the template has the slot {{{shown}}}, so each prompt would show its answer, which follows it by itself: "
            "leave the slot out"
        )


def _find_text(name: str) -> str:
    if name in ("toy_choice", "toy_generation"):
        from fedlight.toy import world

        return world.CHOICE_TEMPLATE if name == "toy_choice" else world.GENERATION_TEMPLATE
    if name not in TEXTS:
        known = ", ".join([*TEXTS, "toy_choice", "toy_generation", CHAT])
        raise ValueError(
            f"template={name!r} is not one of {known}; a text of your own needs slots such as {{prompt}}."
        )
    return TEXTS[name]


def _list_slots(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(slot for _, slot, _, _ in Formatter().parse(text) if slot))
