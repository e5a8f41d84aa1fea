"""Self-Instruct: a language model writes instructions like a client's own, and their responses.

Wang et al., "Self-Instruct", ACL 2023, https://arxiv.org/abs/2212.10560, in the form that Wang et al., "Federated
Instruction Tuning of LLMs with Domain Coverage Augmentation" (FedDCA), https://arxiv.org/abs/2409.20135, appendix A.7,
compare with: two examples of the client -> a new instruction; one example -> its response. Addition: an instruction that
is too similar to a known one is dropped (ROUGE-L above 0.7, as in Self-Instruct; FedDCA does not say whether it does).

The prompts are those of its figure 7, word for word; the paper does not show the line breaks, which are chosen here.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from fedlight.augmentation.self_instruct.tries import (
    ACCEPTED,
    NO_RESPONSE,
    REASONS,
    ClientTries,
    Try,
    fingerprint,
    next_tries,
    open_record,
)
from fedlight.datamodules.instructions.augmentation import Added, Augmentation
from fedlight.datamodules.rows.fields import NO_SLOTS, instruction_text
from fedlight.datamodules.text.templates import Template
from fedlight.generators.endpoint import TextGenerator
from fedlight.processes.work import is_first, once
from fedlight.support.checks import check_range, refuse_below
from fedlight.support.console import progress_bar
from fedlight.support.types import Fields

INSTRUCTION_PROMPT = """\
You are asked to come up with instructions. Don't repeat instructions in examples. Here are some examples:
Instruction 1: {first}
Instruction 2: {second}
Provide a new instruction below:"""

RESPONSE_PROMPT = """\
Example 1:
Instruction: {instruction}
Response: {response}

Generate the response of this instruction, Instruction: {new}"""

# Answers repeat the prompt's labels, some in bold or with a number.
_LABEL = re.compile(r"\W*(?:new )?(?:instruction|response)\s*\d*\s*:[\s*]*", re.IGNORECASE)
_AFTER_INSTRUCTION = re.compile(r"\n\W*(?:instruction|response)\s*\d*\s*:", re.IGNORECASE)
_AFTER_RESPONSE = re.compile(r"\n\W*(?:example\s*\d*\s*:\s*)?instruction\s*\d*\s*:", re.IGNORECASE)


class SelfInstruct(Augmentation):
    """Rows that a text generator writes from each client's own, in the order of writing; public rows are not used.

    A generator on another machine sees private rows, which a warning says.

    Args:
        number: rows wanted for each client.
        generator: generator of answers to the prompts: `LocalGenerator`, `fedlight.generators.endpoint.ChatEndpoint`.
        max_rouge_l: upper bound of the ROUGE-L F1 of a new instruction with any of the client's, own or made, in [0, 1].
        max_words: most words of a new instruction, >= 1.
        tries_per_row: most tries of a client, in multiples of ``number``, >= 1.
        give_up_after: number of dropped tries in a row that ends a client's tries, >= 1.
        batch_size: tries of all clients that are made at once, >= 1.
        slot: slot of the template for the new instruction; the other slots are left empty.
        instruction_prompt: prompt for an instruction, with the slots ``{first}`` and ``{second}``.
        response_prompt: prompt for its response, with the slots ``{instruction}``, ``{response}`` and ``{new}``.
        folder: folder of the tries, so that a killed run can resume; None: beside the rows that a datamodule records.

    Raises:
        ValueError: a setting is out of range, or a prompt has other slots.
    """

    needs_public = False
    without_effect = ("folder",)

    def __init__(
        self,
        number: int,
        generator: TextGenerator,
        max_rouge_l: float = 0.7,
        max_words: int = 150,
        tries_per_row: int = 4,
        give_up_after: int = 50,
        batch_size: int = 64,
        slot: str = "instruction",
        instruction_prompt: str = INSTRUCTION_PROMPT,
        response_prompt: str = RESPONSE_PROMPT,
        folder: str | None = None,
    ) -> None:
        super().__init__(number)
        check_range("max_rouge_l", max_rouge_l, 0, 1)
        refuse_below(1, max_words=max_words, tries_per_row=tries_per_row)
        refuse_below(1, give_up_after=give_up_after, batch_size=batch_size)
        check_prompt("instruction_prompt", instruction_prompt, ("first", "second"))
        check_prompt("response_prompt", response_prompt, ("instruction", "response", "new"))
        self.generator, self.slot, self.folder = generator, slot, folder
        self.max_rouge_l, self.max_words, self.batch_size = max_rouge_l, max_words, batch_size
        self.tries_per_row, self.give_up_after = tries_per_row, give_up_after
        self.instruction_prompt, self.response_prompt = instruction_prompt, response_prompt
        self._tries = 0
        self._reasons: Counter[str] = Counter()

    def keep_in(self, folder: Path) -> None:
        self.folder = self.folder or str(folder)

    def augment(
        self, clients: Mapping[str, Sequence[Fields]], public: Sequence[Fields], seed: int
    ) -> dict[str, list[Added]]:
        """Return the rows made for each client; raise ValueError if the clients' rows have no ``slot``."""
        self._check_slot(clients)
        settings, states = self.settings(), {name: self._client(name, rows) for name, rows in clients.items()}
        wanted = self.number * sum(map(bool, clients.values()))  # clients without rows get none
        with (
            open_record(
                self.folder if is_first() else None, settings, fingerprint(settings, clients, seed)
            ) as record,
            progress_bar("Self-Instruct", wanted) as advance,
        ):
            # One process reads the file, and all replay the same tries.
            known: list[list[Any]] = once(
                lambda: [[tuple(attempt) for attempt in batch] for batch in record.batches]
            )
            for attempt in (Try(*values) for batch in known for values in batch):
                states[attempt.client].replay(attempt)
            advance(sum(len(client.accepted) for client in states.values()))
            todo = next_tries(list(states.values()), self.batch_size)
            if todo:
                self._warn_of_sending(sum(map(bool, clients.values())))
            draw = len(known)  # makes answers differ where a client with few rows shows the same ones again
            while todo:
                tries = self._make(todo, seed, draw)
                record.append(tries)
                for attempt in tries:
                    states[attempt.client].count(attempt)
                advance(sum(attempt.outcome == ACCEPTED for attempt in tries))
                todo, draw = next_tries(list(states.values()), self.batch_size), draw + 1
        self.generator.release()  # training needs its memory
        self._log_summary(list(states.values()))
        return {
            name: [self._to_added(attempt, client.rows) for attempt in client.accepted]
            for name, client in states.items()
        }

    def why_fewer(self) -> str:
        dropped = f" ({self._list_dropped()})" if self._tries else ""
        return f"tries_per_row={self.tries_per_row} and give_up_after={self.give_up_after} ended the tries{dropped}"

    def record(self) -> dict[str, object]:
        """Return the tries of the last call, the dropped ones by reason, and the generator's usage."""
        return {"tries": self._tries, "dropped": dict(self._reasons), "generator": self.generator.usage()}

    def _client(self, name: str, rows: Sequence[Fields]) -> ClientTries:
        return ClientTries(
            name,
            rows,
            self.number,
            max_rouge_l=self.max_rouge_l,
            max_words=self.max_words,
            max_tries=self.number * self.tries_per_row,
            give_up_after=self.give_up_after,
        )

    def _make(self, todo: Sequence[tuple[ClientTries, int]], seed: int, draw: int) -> list[Try]:
        """Return a batch of tries: all instructions at once, then the responses to those that pass."""
        shown = [client.draw_examples(number, seed) for client, number in todo]
        prompt = Template(self.instruction_prompt)
        asked = [
            prompt.render({"first": instruction_text(first), "second": instruction_text(second)}).text
            for first, second, _ in shown
        ]
        new = [extract_instruction(answer) for answer in self._ask(asked, draw)]
        outcomes = [client.judge(text) for (client, _), text in zip(todo, new, strict=True)]
        passed = [index for index, outcome in enumerate(outcomes) if outcome == ACCEPTED]
        prompt = Template(self.response_prompt)
        asked = []
        for index in passed:
            example = shown[index][2]
            slots = {"instruction": instruction_text(example), "response": example["response"]}
            asked.append(prompt.render({**slots, "new": new[index]}).text)
        answers = self._ask(asked, draw) if asked else []
        responses = {index: extract_response(answer) for index, answer in zip(passed, answers, strict=True)}
        tries = []
        for index, (client, number) in enumerate(todo):
            response = responses.get(index, "")
            outcome = NO_RESPONSE if outcomes[index] == ACCEPTED and not response else outcomes[index]
            tries.append(Try(client.name, number, outcome, new[index], response))
        return tries

    def _ask(self, prompts: list[str], draw: int) -> list[str]:
        """Return the generator's answers; one that does not share its work among processes is asked once for all."""
        if self.generator.shares_work:
            return self.generator.complete(prompts, draw)
        return once(lambda: self.generator.complete(prompts, draw))

    def _to_added(self, attempt: Try, rows: Sequence[Fields]) -> Added:
        slots = {name: "" for name in rows[0] if name not in NO_SLOTS}
        return Added({**slots, self.slot: attempt.instruction, "response": attempt.response})

    def _check_slot(self, clients: Mapping[str, Sequence[Fields]]) -> None:
        for rows in clients.values():
            if rows and self.slot not in rows[0]:
                slots = ", ".join(name for name in rows[0] if name not in NO_SLOTS)
                raise ValueError(
                    f"slot={self.slot!r}, but the clients' rows have {slots}: set slot to one of these"
                )

    def _warn_of_sending(self, clients: int) -> None:
        if self.generator.sends_to is not None and is_first():
            rank_zero_warn(
                f"SelfInstruct sends private rows of {clients} clients to {self.generator.sends_to}: three examples "
                "with each new row. LocalGenerator keeps them on this machine."
            )

    def _log_summary(self, clients: Sequence[ClientTries]) -> None:
        self._tries = sum(client.tries for client in clients)
        self._reasons = sum((client.dropped for client in clients), Counter())
        made = sum(len(client.accepted) for client in clients)
        text = f"SelfInstruct: {made:,} rows for {len(clients):,} clients from {self._tries:,} tries; {self._list_dropped()}"
        if short := [client for client in clients if len(client.accepted) < self.number]:
            least = min(short, key=lambda client: len(client.accepted))
            without = sum(not client.rows for client in short)
            text += f"; {len(short):,} clients have fewer than number={self.number:,}, the fewest {least.name} with "
            text += f"{len(least.accepted):,}"
            text += f" ({without:,} clients have no row to show)" if without else ""
        rank_zero_info(text)

    def _list_dropped(self) -> str:
        dropped = ", ".join(
            f"{self._reasons[reason]:,} {reason}" for reason in REASONS if self._reasons[reason]
        )
        return f"dropped: {dropped or 'none'}"


def check_prompt(name: str, text: str, slots: tuple[str, ...]) -> None:
    """Raise ValueError for a prompt with other slots.

    Examples:
        >>> check_prompt("response_prompt", "{response}", ("response", "new"))
        Traceback (most recent call last):
        ...
        ValueError: response_prompt has the slots {response}, but needs {response}, {new}
    """
    given = Template(text).slots
    if set(given) != set(slots):
        have, needs = (", ".join(f"{{{slot}}}" for slot in some) or "none" for some in (given, slots))
        raise ValueError(f"{name} has the slots {have}, but needs {needs}")


def extract_instruction(answer: str) -> str:
    r"""Return the one instruction in an answer, without a label before it and without further instructions.

    Examples:
        >>> extract_instruction("Instruction 3: Name a planet.\nInstruction 4: Name a star.")
        'Name a planet.'
    """
    return _extract(answer, _AFTER_INSTRUCTION)


def extract_response(answer: str) -> str:
    r"""Return the one response in an answer, without a label before it and without further examples.

    Examples:
        >>> extract_response(" **Response:** It is Mars.\n\nExample 2:\nInstruction: Name a star.")
        'It is Mars.'
    """
    return _extract(answer, _AFTER_RESPONSE)


def _extract(answer: str, end: re.Pattern[str]) -> str:
    text = answer.strip()
    label = _LABEL.match(text)
    return end.split(text[label.end() if label else 0 :], maxsplit=1)[0].strip()
