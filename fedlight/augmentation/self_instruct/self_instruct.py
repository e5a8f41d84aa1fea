"""Self-Instruct: a language model invents instructions like a client's own, and answers them.

Wang et al., "Self-Instruct", ACL 2023, https://arxiv.org/abs/2212.10560, in the form in which Wang et al., "Federated
Instruction Tuning of LLMs with Domain Coverage Augmentation" (FedDCA), https://arxiv.org/abs/2409.20135, appendix A.7,
compare with it: two examples of the client -> a new instruction; one example -> its response. Added: an instruction
that is too near to a known one is dropped (ROUGE-L above 0.7, as in Self-Instruct; FedDCA does not say whether it does).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from fedlight.augmentation.self_instruct.client import ACCEPTED, NO_RESPONSE, REASONS, ClientTries, next_tries
from fedlight.augmentation.self_instruct.prompts import (
    INSTRUCTION_PROMPT,
    RESPONSE_PROMPT,
    check_prompt,
    instruction_in,
    prompt_for_instruction,
    prompt_for_response,
    response_in,
)
from fedlight.augmentation.self_instruct.record import Try, fingerprint, open_record
from fedlight.datamodules.instructions.augmentation import Added, Augmentation
from fedlight.datamodules.rows.fields import NO_SLOTS
from fedlight.generators.endpoint import TextGenerator
from fedlight.support.checks import refuse_below
from fedlight.support.console import progress_bar
from fedlight.support.types import Fields


class SelfInstruct(Augmentation):
    """Rows that a text generator makes from each client's own; it needs no public rows.

    A generator elsewhere gets to see private rows: that is the price of this baseline, and a warning says so.

    Args:
        number: rows wanted for each client.
        generator: what answers the prompts: `LocalGenerator`, `fedlight.generators.endpoint.ChatEndpoint`.
        max_rouge_l: most ROUGE-L F1 of a new instruction with any of the client's, own or made, in [0, 1].
        max_words: most words of a new instruction.
        tries_per_row: a client gets at most ``number`` times so many tries.
        give_up_after: so many dropped tries in a row end a client's tries.
        batch_size: tries of all clients that are made at once.
        slot: the slot of the template that takes the new instruction; the others are left empty.
        instruction_prompt: asks for an instruction, with the slots ``{first}`` and ``{second}``.
        response_prompt: asks for its response, with the slots ``{instruction}``, ``{response}`` and ``{new}``.
        folder: where the tries are kept as they are made; a run that was killed goes on from there. None: beside
            the rows that a datamodule records.

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
        if not 0 <= max_rouge_l <= 1:
            raise ValueError(f"max_rouge_l={max_rouge_l} must lie in [0, 1]")
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
        """See `Augmentation.keep_in`."""
        self.folder = self.folder or str(folder)

    def augment(
        self, clients: Mapping[str, Sequence[Fields]], public: Sequence[Fields], seed: int
    ) -> dict[str, list[Added]]:
        """The rows made for each client, in the order in which they were made; ``public`` is not looked at.

        Raises:
            ValueError: the rows have no ``slot``.
        """
        self._check_slot(clients)
        settings, own = self.settings(), {name: self._client(name, rows) for name, rows in clients.items()}
        wanted = self.number * sum(map(bool, clients.values()))
        with (
            open_record(self.folder, settings, fingerprint(settings, clients, seed)) as record,
            progress_bar("Self-Instruct", wanted) as advance,
        ):
            for batch in record.batches:
                for one in batch:
                    own[one.client].replay(one)
            advance(sum(len(client.accepted) for client in own.values()))
            todo = next_tries(list(own.values()), self.batch_size)
            if todo:
                self._warn_of_sending(sum(map(bool, clients.values())))
            draw = len(record.batches)  # a client with few rows shows the same ones again in a later batch
            while todo:
                tries = self._make(todo, seed, draw)
                record.append(tries)
                for one in tries:
                    own[one.client].count(one)
                advance(sum(one.outcome == ACCEPTED for one in tries))
                todo, draw = next_tries(list(own.values()), self.batch_size), draw + 1
        self.generator.release()
        self._tell(list(own.values()))
        return {
            name: [self._added(one, client.rows) for one in client.accepted] for name, client in own.items()
        }

    def why_fewer(self) -> str:
        """See `Augmentation`."""
        dropped = f" ({self._dropped()})" if self._tries else ""
        return f"tries_per_row={self.tries_per_row} and give_up_after={self.give_up_after} ended the tries{dropped}"

    def record(self) -> dict[str, object]:
        """Tries of the last call, those dropped by reason, and what the generator counted."""
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
        """A batch of tries: all instructions at once, then the responses to those that pass."""
        shown = [client.examples(number, seed) for client, number in todo]
        asked = [prompt_for_instruction(self.instruction_prompt, *examples[:2]) for examples in shown]
        new = [instruction_in(answer) for answer in self.generator.complete(asked, draw)]
        outcomes = [client.judge(text) for (client, _), text in zip(todo, new, strict=True)]
        passed = [index for index, outcome in enumerate(outcomes) if outcome == ACCEPTED]
        asked = [prompt_for_response(self.response_prompt, shown[index][2], new[index]) for index in passed]
        answers = self.generator.complete(asked, draw) if asked else []
        responses = {index: response_in(answer) for index, answer in zip(passed, answers, strict=True)}
        tries = []
        for index, (client, number) in enumerate(todo):
            response = responses.get(index, "")
            outcome = NO_RESPONSE if outcomes[index] == ACCEPTED and not response else outcomes[index]
            tries.append(Try(client.name, number, outcome, new[index], response))
        return tries

    def _added(self, one: Try, rows: Sequence[Fields]) -> Added:
        slots = {name: "" for name in rows[0] if name not in NO_SLOTS}
        return Added({**slots, self.slot: one.instruction, "response": one.response})

    def _check_slot(self, clients: Mapping[str, Sequence[Fields]]) -> None:
        for rows in clients.values():
            if rows and self.slot not in rows[0]:
                slots = ", ".join(name for name in rows[0] if name not in NO_SLOTS)
                raise ValueError(
                    f"slot={self.slot!r}, but the clients' rows have {slots}: set slot to one of these"
                )

    def _warn_of_sending(self, clients: int) -> None:
        if self.generator.sends_to is not None:
            rank_zero_warn(
                f"SelfInstruct sends private rows of {clients} clients to {self.generator.sends_to}: three examples "
                "with each new row. LocalGenerator keeps them on this machine."
            )

    def _tell(self, clients: Sequence[ClientTries]) -> None:
        self._tries = sum(client.tries for client in clients)
        self._reasons = sum((client.dropped for client in clients), Counter())
        made = sum(len(client.accepted) for client in clients)
        text = f"SelfInstruct: {made:,} rows for {len(clients):,} clients from {self._tries:,} tries; {self._dropped()}"
        if short := [client for client in clients if len(client.accepted) < self.number]:
            least = min(short, key=lambda client: len(client.accepted))
            without = sum(not client.rows for client in short)
            text += f"; {len(short):,} clients have fewer than number={self.number:,}, the fewest {least.name} with "
            text += f"{len(least.accepted):,}"
            text += f" ({without:,} clients have no row to show)" if without else ""
        rank_zero_info(text)

    def _dropped(self) -> str:
        dropped = ", ".join(
            f"{self._reasons[reason]:,} {reason}" for reason in REASONS if self._reasons[reason]
        )
        return f"dropped: {dropped or 'none'}"
