"""FewFedPIT's generation of data: a client's model continues the client's own examples with new ones.

Zhang et al., "FewFedPIT: Towards Privacy-preserving and Few-shot Federated Instruction Tuning",
https://arxiv.org/abs/2403.06131, section 3.3 and appendix B, adapted from Self-Instruct (Wang et al., ACL 2023,
https://arxiv.org/abs/2212.10560), in two steps:

1. eight local instructions, drawn at random -> a new one. Dropped are those of a failed format, those with a ROUGE-L above
   0.7 to a local instruction, and repetitions.
2. four local examples, alternately with and without an input, and the new instruction -> its input and response. An answer
   in another form is asked for again with other examples, three times in all; copies of a local example are dropped.

A client makes 32 candidates in a round (section 4.1). Drafts that are dropped are replaced, in passes over all clients that
have too few: each pass writes as many new instructions as candidates are missing, until ``number`` candidates are made or
``instruction_tries`` instructions are tried.

Open in the paper and decided here: the limit of tries; a copy is an example whose instruction, input and response together
have a ROUGE-L above 0.7 to a local one; answers that had to be cut off are failures. The wording of the prompts is ours, see
`fedlight.datamodules.synthesis.prompts`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedlight.datamodules.synthesis.asking import Asking, Question, Reply
from fedlight.datamodules.synthesis.demonstrations import alternately, drawn
from fedlight.datamodules.synthesis.filters import NO_MATCH, REASONS, REFUSALS, OwnTexts, format_fault
from fedlight.datamodules.synthesis.prompts import FEWFEDPIT_PROMPTS, SelfGenerationPrompts
from fedlight.datamodules.synthesis.synthesis import SURVIVED, TRIED, Candidate, Synthesis
from fedlight.datamodules.text.templates import Template
from fedlight.evaluation.tasks.model import AnswersPrompts
from fedlight.support.checks import refuse_below
from fedlight.support.seeding import derive_seed
from fedlight.support.types import Fields

FEWER = "fewer_demonstrations"
"""Note: prompts that were made with fewer demonstrations, as they did not fit into the model."""

MISSING = "candidates_missing"
"""Note: candidates that clients have less than ``number``, since the limit of tries was reached."""

SHORT = "clients_short"
"""Note: clients that have less than ``number``."""

TRIES_PER_CANDIDATE = 4
"""Times ``number``: the limit of tries where none is set."""


@dataclass
class Draft:
    """A candidate in the making: first an instruction, then a whole row, or why it was dropped.

    Attributes:
        client: whose it is.
        number: of the client's drafts in this round, from 0.
        row: ``instruction``, ``input`` and ``response``.
        fault: why it was dropped, if so.
    """

    client: str
    number: int
    row: dict[str, str]
    fault: str | None = None


class SelfGeneration(Synthesis):
    """Candidates by in-context learning from the client's own rows.

    Prompts of all clients are answered together, those of similar length in a batch. The order of the clients changes
    nothing. With a temperature above 0 the draws depend on all prompts of a pass, hence on who else takes part in the round
    and, from the second pass on, on who is short of candidates.

    `counts` has all drafts of all passes: those tried are more than ``number`` times the clients where some were replaced.
    `notes` has ``fewer_demonstrations``, ``candidates_missing`` and ``clients_short``.

    Args:
        number: candidates that are made for each client, >= 1.
        instruction_demonstrations: local instructions in the first prompt, >= 0; a client with fewer shows all it has.
        response_demonstrations: local examples in the second prompt, >= 0, likewise.
        tries: for an answer to the second prompt that has the right form, >= 1.
        instruction_tries: most new instructions that are tried for each client in a round, >= ``number``; at ``number``
            none is replaced. None: 4 times ``number``, our choice.
        max_rouge_l: most ROUGE-L F1 with a local instruction or example, in [0, 1].
        min_words: fewest words of an instruction, as blanks separate them; 1 for scripts without blanks.
        refusals: words that a failed instruction begins with.
        max_instruction_tokens: most tokens of a new instruction.
        max_response_tokens: most tokens of an input and a response with their labels.
        temperature: 0 for greedy decoding.
        top_p: share of the probability to draw from, in (0, 1].
        batch_size: prompts at once.
        keep_cut: an answer that had to be cut off is no failure.
        instruction_slot: the template's slot for the instruction.
        input_slot: its slot for the input; a template without it has no inputs.
        prompts: what is asked, and how answers are read.

    Raises:
        ValueError: a setting is out of range, or all candidates of a client would be the same.
    """

    def __init__(
        self,
        number: int = 32,
        instruction_demonstrations: int = 8,
        response_demonstrations: int = 4,
        tries: int = 3,
        instruction_tries: int | None = None,
        max_rouge_l: float = 0.7,
        min_words: int = 3,
        refusals: Sequence[str] = REFUSALS,
        max_instruction_tokens: int = 64,
        max_response_tokens: int = 256,
        temperature: float = 0.0,
        top_p: float = 1.0,
        batch_size: int = 16,
        keep_cut: bool = False,
        instruction_slot: str = "instruction",
        input_slot: str = "input",
        prompts: SelfGenerationPrompts = FEWFEDPIT_PROMPTS,
    ) -> None:
        super().__init__()
        refuse_below(1, number=number, tries=tries, min_words=min_words, batch_size=batch_size)
        refuse_below(
            1, max_instruction_tokens=max_instruction_tokens, max_response_tokens=max_response_tokens
        )
        refuse_below(0, instruction_demonstrations=instruction_demonstrations)
        refuse_below(0, response_demonstrations=response_demonstrations)
        if instruction_tries is not None and instruction_tries < number:
            raise ValueError(
                f"instruction_tries={instruction_tries} must be at least number={number}: each candidate takes one"
            )
        if temperature < 0 or not 0 < top_p <= 1 or not 0 <= max_rouge_l <= 1:
            raise ValueError(
                f"temperature={temperature} must be at least 0, top_p={top_p} lie in (0, 1], and "
                f"max_rouge_l={max_rouge_l} in [0, 1]"
            )
        if instruction_demonstrations == 0 and temperature == 0:
            raise ValueError(
                "instruction_demonstrations=0 with temperature=0 writes the same instruction each time: show some, or set "
                "temperature above 0"
            )
        self.number, self.tries, self.max_rouge_l, self.min_words = number, tries, max_rouge_l, min_words
        self.instruction_tries = (
            TRIES_PER_CANDIDATE * number if instruction_tries is None else instruction_tries
        )
        self.instruction_demonstrations = instruction_demonstrations
        self.response_demonstrations = response_demonstrations
        self.refusals, self.keep_cut = list(refusals), keep_cut
        self.max_instruction_tokens, self.max_response_tokens = max_instruction_tokens, max_response_tokens
        self.temperature, self.top_p, self.batch_size = temperature, top_p, batch_size
        self.instruction_slot, self.input_slot, self.prompts = instruction_slot, input_slot, prompts

    def make(
        self, clients: Mapping[str, Sequence[Fields]], template: Template, model: AnswersPrompts, seed: int
    ) -> dict[str, list[Candidate]]:
        """See `Synthesis.make`.

        Raises:
            ValueError: the template has no ``instruction_slot``.
        """
        if self.instruction_slot not in template.slots:
            raise ValueError(
                f"instruction_slot={self.instruction_slot!r}, but the template has {', '.join(template.slots)}: "
                "set instruction_slot to one of these"
            )
        # A table has the same columns in each round.
        self.counts = Counter(dict.fromkeys((TRIED, SURVIVED, *REASONS), 0))
        self.notes = Counter(dict.fromkeys((FEWER, MISSING, SHORT), 0))
        # Sorted, since prompts of equal length share a batch, and its draws, in this order.
        rows = {client: [self._row(fields) for fields in clients[client]] for client in sorted(clients)}
        drafts = self._drafts(rows, template, model, seed)
        made = {client: [draft for draft in drafts[client] if draft.fault is None] for client in clients}
        self.notes[MISSING] = sum(self.number - len(own) for own in made.values())
        self.notes[SHORT] = sum(len(own) < self.number for own in made.values())
        return {
            client: [Candidate(self._fields(draft.row, template)) for draft in own]
            for client, own in made.items()
        }

    def _drafts(
        self, rows: Mapping[str, list[Fields]], template: Template, model: AnswersPrompts, seed: int
    ) -> dict[str, list[Draft]]:
        """All drafts of each client, in the order in which they were made."""
        texts = {client: OwnTexts(own, self.max_rouge_l) for client, own in rows.items()}
        drafts: dict[str, list[Draft]] = {client: [] for client in rows}
        passes = 0
        while new := [draft for client, own in drafts.items() for draft in self._next_drafts(client, own)]:
            of_pass = derive_seed(seed, "pass", passes) if passes else seed
            passes += 1
            self._write_instructions(new, rows, texts, model, of_pass)
            self._write_responses(
                [draft for draft in new if draft.fault is None], rows, template, model, of_pass
            )
            for draft in new:
                draft.fault = draft.fault or texts[draft.client].example_fault(draft.row)
                self.counts.update([TRIED, draft.fault or SURVIVED])
                drafts[draft.client].append(draft)
        return drafts

    def _next_drafts(self, client: str, drafts: Sequence[Draft]) -> list[Draft]:
        """As many as the client lacks candidates, and as its limit of tries leaves."""
        lacking = self.number - sum(draft.fault is None for draft in drafts)
        end = min(len(drafts) + lacking, self.instruction_tries)
        return [Draft(client, number, {}) for number in range(len(drafts), end)]

    def _write_instructions(
        self,
        drafts: Sequence[Draft],
        rows: Mapping[str, list[Fields]],
        texts: Mapping[str, OwnTexts],
        model: AnswersPrompts,
        seed: int,
    ) -> None:
        questions = []
        for draft in drafts:
            rng = np.random.default_rng(derive_seed(seed, "instruction", draft.client, draft.number))
            shown = drawn(rng, rows[draft.client], self.instruction_demonstrations)
            questions.append(Question(shown, self.prompts.for_instruction))
        asking = self._asking(model, self.max_instruction_tokens, self.prompts.instruction_stop)
        answers = self._ask(asking, questions, derive_seed(seed, "instructions"), "New instructions")
        for draft, answer in zip(drafts, answers, strict=True):
            instruction = self.prompts.instruction_in(answer.text)
            draft.row = {"instruction": instruction or "", "input": "", "response": ""}
            draft.fault = answer.fault or (NO_MATCH if instruction is None else None)
            draft.fault = draft.fault or format_fault(draft.row["instruction"], self.min_words, self.refusals)
            draft.fault = draft.fault or texts[draft.client].instruction_fault(draft.row["instruction"])

    def _write_responses(
        self,
        drafts: Sequence[Draft],
        rows: Mapping[str, list[Fields]],
        template: Template,
        model: AnswersPrompts,
        seed: int,
    ) -> None:
        """Input and response of each draft, in passes over those that are still without."""
        asking = self._asking(model, self.max_response_tokens, self.prompts.response_stop)
        missing = drafts
        for attempt in range(self.tries):
            questions = [
                self._response_question(draft, rows[draft.client], attempt, seed) for draft in missing
            ]
            answers = self._ask(asking, questions, derive_seed(seed, "responses", attempt), "Responses")
            for draft, answer in zip(missing, answers, strict=True):
                draft.fault = answer.fault or self._complete(draft, answer.text, template)
            missing = [draft for draft in missing if draft.fault is not None]

    def _response_question(self, draft: Draft, own: list[Fields], attempt: int, seed: int) -> Question:
        rng = np.random.default_rng(derive_seed(seed, "response", draft.client, draft.number, attempt))
        instruction = draft.row["instruction"]
        shown = alternately(rng, own, self.response_demonstrations)
        return Question(shown, lambda examples: self.prompts.for_response(examples, instruction))

    def _complete(self, draft: Draft, text: str, template: Template) -> str | None:
        """Takes over what an answer says; why it could not, if so."""
        found = self.prompts.response_in(text)
        if found is None:
            return NO_MATCH
        if found[0] and self.input_slot not in template.slots:
            return NO_MATCH
        draft.row |= {"input": found[0], "response": found[1]}
        return None

    def _ask(self, asking: Asking, questions: list[Question], seed: int, what: str) -> list[Reply]:
        answers = asking.ask(questions, seed, what)
        fewer = sum(
            0 < answer.shown < len(asked.shown) for asked, answer in zip(questions, answers, strict=True)
        )
        self.notes[FEWER] += fewer
        return answers

    def _asking(self, model: AnswersPrompts, max_new_tokens: int, stop: Sequence[str]) -> Asking:
        return Asking(
            model, max_new_tokens, stop, self.temperature, self.top_p, self.batch_size, self.keep_cut
        )

    def _row(self, fields: Fields) -> Fields:
        return {
            "instruction": fields[self.instruction_slot],
            "input": fields.get(self.input_slot, "").strip(),
            "response": fields["response"],
        }

    def _fields(self, row: Fields, template: Template) -> dict[str, str]:
        named = {
            self.instruction_slot: row["instruction"],
            self.input_slot: row["input"],
            "response": row["response"],
        }
        return {name: named.get(name, "") for name in (*template.slots, "response")}
