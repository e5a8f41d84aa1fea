"""Prompt templates: texts with named slots, one of which may be cut when the prompt is too long.

The summarization and question-answering templates are those of Figure 4 in Wu et al., "Towards Federated RLHF with
Aggregated Client Preference for LLMs" (FedBiscuit), ICLR 2025, https://arxiv.org/abs/2407.03038, word for word, with the
slots ``output_A`` and ``output_B`` named ``response_a`` and ``response_b``; ``instruction`` of SHP keeps its name. The two
question-answering templates are Alpaca's (Taori et al. 2023, https://github.com/tatsu-lab/stanford_alpaca).

``alpaca_joined`` is Alpaca's form without input, with the input after the instruction and a blank. It is the format of
OpenFedLLM (Ye et al. 2024, https://arxiv.org/abs/2402.06954, https://github.com/rui-ye/OpenFedLLM) and of Wang et al.
(FedDCA, https://arxiv.org/abs/2409.20135, appendix A.3.1), without the blank at the end of the instruction's line.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from string import Formatter

ANSWER_SLOTS = ("response_a", "response_b")
MARKS = ("#", "<", "[")
STOP_CHARACTERS = 40
TRIM_ORDER = ("post", "input", "prompt", "instruction")

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

ALPACA_JOINED = ALPACA_NO_INPUT.replace("{instruction}", "{instruction} {input}")

TLDR_GENERATION = """Below is an instruction that describes a task, paired with an input that provides \
further context. Write a response that appropriately completes the request.

### Instruction:
Summarize the following Reddit post in a paragraph of 50 words or less.

### Input:
SUBREDDIT: r/{subreddit}
TITLE: {title}
POST: {post}

### Response:"""

TLDR_CHOICE = """Below is a forum post followed by two summaries. Pick a more precise and concise one that summarizes \
the most important points in the given forum post, without including unimportant or irrelevant details. \
State your choice with a single capital letter, i.e., "A" if SUMMARY A is better, "B" if SUMMARY B is better.

### SUBREDDIT: r/{subreddit}
### TITLE: {title}
### POST: {post}
### SUMMARY A: {response_a}
### SUMMARY B: {response_b}
### YOUR CHOICE:"""

SHP_CHOICE = """Below is a query followed by two responses. Pick a helpful response that is precise, concise, \
and casual. State your choice with a single capital letter, i.e., "A" if RESPONSE A is better, "B" if RESPONSE B is \
better.

### QUERY: {instruction}
### RESPONSE A: {response_a}
### RESPONSE B: {response_b}
### YOUR CHOICE:"""

ARGUMENT_CHOICE = """Below is a claim followed by two arguments for it. Pick the more convincing argument. \
State your choice with a single capital letter, i.e., "A" if ARGUMENT A is more convincing, "B" if ARGUMENT B is \
more convincing.

### CLAIM: {prompt}
### ARGUMENT A: {response_a}
### ARGUMENT B: {response_b}
### YOUR CHOICE:"""

ARGUMENT_GENERATION = """Below is a claim. Write a convincing argument for it.

### CLAIM: {prompt}

### ARGUMENT:"""

TEXTS = {
    "alpaca": ALPACA,
    "alpaca_no_input": ALPACA_NO_INPUT,
    "alpaca_joined": ALPACA_JOINED,
    "tldr_generation": TLDR_GENERATION,
    "tldr_choice": TLDR_CHOICE,
    "shp_choice": SHP_CHOICE,
    "argument_choice": ARGUMENT_CHOICE,
    "argument_generation": ARGUMENT_GENERATION,
}


@dataclass(frozen=True)
class Parts:
    """Rendered text in three parts; the middle one may be cut at its end."""

    before: str
    trimmable: str
    after: str

    @property
    def text(self) -> str:
        """Whole text."""
        return self.before + self.trimmable + self.after

    def cut(self, characters: int) -> "Parts":
        """Return the parts with this many characters of the trimmable one, without trailing white space."""
        return Parts(self.before, self.trimmable[:characters].rstrip(), self.after)


@dataclass(frozen=True)
class Template:
    """Text with slots in braces (``{{`` for a brace itself); texts that fill a slot are never read as templates.

    Args:
        text: text of the template.
        trim: slot that is cut at its end when the prompt is too long; None: no slot is cut.
        without: template for rows whose ``trim`` slot is empty (Alpaca's form without input).
    """

    text: str
    trim: str | None = None
    without: "Template | None" = None

    @classmethod
    def named(cls, name: str) -> "Template":
        """Return the template of a name, or the template whose text is ``name`` if that has a slot in braces.

        The slot that may be cut is the first of post, input, prompt and instruction that occurs.

        Raises:
            ValueError: ``name`` is neither a known name nor a text with slots.

        Examples:
            >>> Template.named("Claim: {prompt}").trim
            'prompt'
            >>> Template.named("alpaca").slots
            ('instruction', 'input')
        """
        text = name if "{" in name else _find_text(name)
        slots = _list_slots(text)
        trim = next((slot for slot in TRIM_ORDER if slot in slots), None)
        if name in ("alpaca", "alpaca_joined"):
            return cls(text, trim, without=cls(ALPACA_NO_INPUT, "instruction"))
        return cls(text, trim)

    def trimming(self, slot: str | None) -> "Template":
        """Return this template with another slot that may be cut, or None; ValueError where it has no such slot."""
        if slot is not None and slot not in self.slots:
            raise ValueError(f"trim={slot!r} is no slot of the template; it has {', '.join(self.slots)}.")
        return Template(self.text, slot, self.without)

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

        They are the template's first line, its lines with a mark, and the beginnings with a colon of lines with a slot. The
        line before the answer needs a mark: a worked solution may well say "Answer:".

        Examples:
            >>> Template.named("alpaca_no_input").stops[1:]
            ('\n### Instruction:', '\n### Response:')
            >>> Template("Question: {prompt}\nAnswer:").stops
            ('\nQuestion:',)
        """
        parts = [(literal.split("\n"), slot) for literal, slot, _, _ in Formatter().parse(self.text)]
        first = parts[0][0][0] if parts else ""
        heads = [lines[-1] for lines, slot in parts if slot]
        lines = [first] if len(first.split()) > 3 else []
        lines += [head for head in heads if ":" in head]
        lines += [line for own, _ in parts for line in own if line.startswith(MARKS)]
        own = [f"\n{line.rstrip()}"[:STOP_CHARACTERS] for line in lines]
        return tuple(dict.fromkeys([*own, *(self.without.stops if self.without else ())]))

    def render(self, fields: Mapping[str, str], ending: str = "") -> Parts:
        """Fill the slots and append ``ending``, which is never cut.

        Examples:
            >>> Template("POST: {post} TITLE: {title}", trim="post").render({"post": "a b c", "title": "t"})
            Parts(before='POST: ', trimmable='a b c', after=' TITLE: t')
        """
        if self.without is not None and not fields[self.trim or ""].strip():
            return self.without.render(fields, ending)
        parts = ["", "", ""]
        at = 0
        for literal, slot, _, _ in Formatter().parse(self.text):
            parts[at] += literal
            if slot is not None and slot == self.trim and at == 0:
                parts[1] = fields[slot]
                at = 2
            elif slot is not None:
                parts[at] += fields[slot]
        if at == 0:  # no slot to trim: the whole text is fixed
            return Parts(parts[0] + ending, "", "")
        return Parts(parts[0], parts[1], parts[2] + ending)


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


def _find_text(name: str) -> str:
    if name in ("toy_choice", "toy_generation"):
        from fedlight.toy import world

        return world.CHOICE_TEMPLATE if name == "toy_choice" else world.GENERATION_TEMPLATE
    if name not in TEXTS:
        known = ", ".join([*TEXTS, "toy_choice", "toy_generation"])
        raise ValueError(
            f"template={name!r} is not one of {known}; a text of your own needs slots such as {{prompt}}."
        )
    return TEXTS[name]


def _list_slots(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(slot for _, slot, _, _ in Formatter().parse(text) if slot))
