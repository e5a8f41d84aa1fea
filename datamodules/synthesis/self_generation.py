"""FewFedPIT's generation of data by in-context learning from a client's own examples.

Zhang et al., "FewFedPIT: Towards Privacy-preserving and Few-shot Federated Instruction Tuning",
https://arxiv.org/abs/2403.06131, section 3.3 and appendix B, adapted from Self-Instruct (Wang et al., ACL 2023,
https://arxiv.org/abs/2212.10560), in two steps:

1. Eight random local instructions -> a new instruction. It is dropped for a wrong format, for a ROUGE-L above 0.7 to a
   local instruction, and as a repetition.
2. Four local examples, alternately with and without an input, and the new instruction -> its input and response, by default
   one after the other. After an answer of a wrong form the step is repeated with other examples, up to three times; copies
   of a local example are dropped.

A client makes 32 candidates in a round (section 4.1). Dropped drafts are replaced, in passes over all clients with too few
candidates: each pass generates as many new instructions as candidates are missing, until ``number`` candidates are made or
``instructions.tries`` instructions are tried.

The paper leaves open, and this file decides: the limit of tries; a copy is an example whose instruction, input and response
together have a ROUGE-L above 0.7 to a local one, or that has a long text of one; a cut-off answer is a failure. The wording
of the prompts is ours, see `fedlight.datamodules.synthesis.prompts`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import NamedTuple

import numpy as np

from fedlight.datamodules.synthesis.filters import NO_MATCH, REASONS, REFUSALS, OwnTexts, check_format
from fedlight.datamodules.synthesis.generation import BatchGenerator, Prompt, Reply
from fedlight.datamodules.synthesis.prompts import SelfGenerationPrompts, prompts_in
from fedlight.datamodules.synthesis.synthesis import SURVIVED, TRIED, Candidate, Dropped, Synthesis
from fedlight.datamodules.text.templates import MESSAGES, Template
from fedlight.evaluation.tasks.model import AnswersPrompts, HoldsTokenizer
from fedlight.support.checks import Settings, check_range, refuse_below
from fedlight.support.seeding import derive_seed
from fedlight.support.types import Fields

# Names of notes: prompts with fewer demonstrations than wanted, for lack of context; candidates below ``number``, over
# all clients; clients with fewer than ``number``.
FEWER, MISSING, SHORT = "fewer_demonstrations", "candidates_missing", "clients_short"
TRIES_PER_CANDIDATE = 4  # default of instructions.tries / number


@dataclass(frozen=True)
class NewInstructions(Settings):
    """Settings of the first step; in YAML ``instructions: {demonstrations: 8, max_new_tokens: 64}``.

    Args:
        demonstrations: local instructions in the prompt, >= 0; at most all of the client's.
        max_new_tokens: most tokens of an instruction, >= 1.
        tries: most instructions per client and round, at least the ``number`` of candidates; at ``number`` no draft is
            replaced. None: 4 times ``number``, our choice.
        min_words: fewest words of an instruction, separated by blanks, >= 1; 1 for scripts without blanks.
        refusals: words that a failed instruction begins with.
    """

    demonstrations: int = 8
    max_new_tokens: int = 64
    tries: int | None = None
    min_words: int = 3
    refusals: Sequence[str] = REFUSALS

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_below(0, "instructions.", demonstrations=self.demonstrations)
        refuse_below(1, "instructions.", max_new_tokens=self.max_new_tokens, min_words=self.min_words)


@dataclass(frozen=True)
class NewResponses(Settings):
    """Settings of the second step; in YAML ``responses: {demonstrations: 4, max_new_tokens: 256}``.

    Args:
        demonstrations: local examples in the prompt, >= 0; at most all of the client's.
        max_new_tokens: most tokens of an input and a response with their labels, >= 1.
        tries: tries for an answer of the right form, >= 1.
    """

    demonstrations: int = 4
    max_new_tokens: int = 256
    tries: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_below(0, "responses.", demonstrations=self.demonstrations)
        refuse_below(1, "responses.", max_new_tokens=self.max_new_tokens, tries=self.tries)


@dataclass
class Draft:
    """Unfinished candidate."""

    client: str
    number: int  # position among the client's drafts of this round, from 0
    # Instruction, input and response; of a dropped draft the answer that was read.
    row: dict[str, str]
    fault: str | None = None  # reason for dropping it


class _Sources(NamedTuple):
    """Rows of the clients, and what makes candidates from them."""

    rows: Mapping[str, list[Fields]]
    texts: Mapping[str, OwnTexts]
    template: Template
    model: AnswersPrompts


class SelfGeneration(Synthesis):
    """Candidates by in-context learning from the client's own rows.

    Prompts of a client are answered in batches of similar length. Its candidates depend on the seed, its id and its rows,
    not on the order of the clients or on their number.

    `counts` covers all drafts of all passes, replaced ones too.
    `notes` has ``fewer_demonstrations``, ``candidates_missing`` and ``clients_short``.

    Args:
        number: candidates per client, >= 1.
        instructions: settings of the first step.
        responses: settings of the second step.
        max_rouge_l: most ROUGE-L F1 with a local instruction or example, in [0, 1].
        temperature: 0 for greedy decoding.
        top_p: share of the probability to draw from, in (0, 1].
        batch_size: prompts of one client per batch, >= 1.
        keep_cut: accept cut-off answers.
        instruction_slot: the template's slot for the instruction.
        input_slot: the template's slot for the input; a template without it has no inputs.
        prompts: texts of both prompts and patterns of their answers. None: instructions in a list, and examples in the
            template of the clients' rows, see `fedlight.datamodules.synthesis.prompts.prompts_in`.

    Raises:
        ValueError: a setting is out of range, or all candidates of a client would be the same; in `make`, the template has
            no ``instruction_slot``, or shows whole conversations.
    """

    def __init__(
        self,
        number: int = 32,
        instructions: NewInstructions = NewInstructions(),
        responses: NewResponses = NewResponses(),
        max_rouge_l: float = 0.7,
        temperature: float = 0.0,
        top_p: float = 1.0,
        batch_size: int = 16,
        keep_cut: bool = False,
        instruction_slot: str = "instruction",
        input_slot: str = "input",
        prompts: SelfGenerationPrompts | None = None,
    ) -> None:
        super().__init__()
        refuse_below(1, number=number, batch_size=batch_size)
        self.max_tries = TRIES_PER_CANDIDATE * number if instructions.tries is None else instructions.tries
        if self.max_tries < number:
            raise ValueError(
                f"instructions.tries={self.max_tries} must be at least number={number}: each candidate takes one"
            )
        check_range("temperature", temperature, 0, float("inf"))
        check_range("top_p", top_p, 0, 1, above_low=True)
        check_range("max_rouge_l", max_rouge_l, 0, 1)
        if instructions.demonstrations == 0 and temperature == 0:
            raise ValueError(
                "instructions.demonstrations=0 with temperature=0 writes the same instruction each time: set either above 0"
            )
        self.number, self.instructions, self.responses = number, instructions, responses
        self.max_rouge_l, self.keep_cut = max_rouge_l, keep_cut
        self.temperature, self.top_p, self.batch_size = temperature, top_p, batch_size
        self.instruction_slot, self.input_slot, self.prompts = instruction_slot, input_slot, prompts

    def make(
        self, clients: Mapping[str, Sequence[Fields]], template: Template, model: AnswersPrompts, seed: int
    ) -> dict[str, list[Candidate]]:
        if MESSAGES in template.slots:
            raise ValueError(
                "SelfGeneration writes no conversations: give data.columns.instruction and data.columns.response in place "
                "of messages, such as messages.0 and messages.1"
            )
        if self.instruction_slot not in template.slots:
            raise ValueError(
                f"instruction_slot={self.instruction_slot!r}, but the template has {', '.join(template.slots)}: "
                "set instruction_slot to one of these"
            )
        self._prompts = self.prompts or self._prompts_in(template, model)
        # All names are counted, at 0 too, so that the logged table has the same columns in each round.
        self.counts = Counter(dict.fromkeys((TRIED, SURVIVED, *REASONS), 0))
        self.notes = Counter(dict.fromkeys((FEWER, MISSING, SHORT), 0))
        rows = {client: [self._to_row(fields) for fields in given] for client, given in clients.items()}
        texts = {client: OwnTexts(client_rows, self.max_rouge_l) for client, client_rows in rows.items()}
        drafts = self._make_drafts(_Sources(rows, texts, template, model), seed)
        made = {client: [draft for draft in drafts[client] if draft.fault is None] for client in clients}
        self.notes[MISSING] = sum(self.number - len(kept) for kept in made.values())
        self.notes[SHORT] = sum(len(kept) < self.number for kept in made.values())
        self.dropped = [
            Dropped(draft.client, draft.row, draft.fault)
            for client_drafts in drafts.values()
            for draft in client_drafts
            if draft.fault
        ]
        return {
            client: [Candidate(self._to_fields(draft.row, template)) for draft in kept]
            for client, kept in made.items()
        }

    def _make_drafts(self, sources: _Sources, seed: int) -> dict[str, list[Draft]]:
        drafts: dict[str, list[Draft]] = {client: [] for client in sources.rows}
        passes = 0
        while new := [draft for client, past in drafts.items() for draft in self._begin_drafts(client, past)]:
            pass_seed = derive_seed(seed, "pass", passes) if passes else seed
            passes += 1
            self._write_instructions(new, sources, pass_seed)
            self._write_responses([draft for draft in new if draft.fault is None], sources, pass_seed)
            for draft in new:
                draft.fault = draft.fault or sources.texts[draft.client].check_example(draft.row)
                self.counts.update([TRIED, draft.fault or SURVIVED])
                drafts[draft.client].append(draft)
        return drafts

    def _begin_drafts(self, client: str, drafts: Sequence[Draft]) -> list[Draft]:
        """Return a new draft for each missing candidate, within the client's limit of tries."""
        lacking = self.number - sum(draft.fault is None for draft in drafts)
        end = min(len(drafts) + lacking, self.max_tries)
        return [Draft(client, number, {}) for number in range(len(drafts), end)]

    def _write_instructions(self, drafts: Sequence[Draft], sources: _Sources, seed: int) -> None:
        """Fill in the instruction of each draft, or its fault."""
        prompts = []
        for draft in drafts:
            rng = np.random.default_rng(derive_seed(seed, "instruction", draft.client, draft.number))
            shown = _draw(rng, sources.rows[draft.client], self.instructions.demonstrations)
            prompts.append(Prompt(draft.client, shown, self._prompts.write_instruction_prompt))
        most, stop = self.instructions.max_new_tokens, self._prompts.instruction.stop
        seed = derive_seed(seed, "instructions")
        answers = self._ask(sources.model, most, stop, prompts, seed, "New instructions")
        for draft, answer in zip(drafts, answers, strict=True):
            read = self._prompts.read_instruction(answer.text)
            instruction = read or ""
            draft.row = {"instruction": answer.text if read is None else read, "input": "", "response": ""}
            draft.fault = (
                answer.fault
                or (NO_MATCH if read is None else None)
                or check_format(instruction, self.instructions.min_words, self.instructions.refusals)
                or sources.texts[draft.client].check_instruction(instruction)
            )

    def _write_responses(self, drafts: Sequence[Draft], sources: _Sources, seed: int) -> None:
        """Fill in input and response of each draft, or its fault; repeat for failed drafts up to ``tries`` times."""
        most, stop = self.responses.max_new_tokens, self._prompts.response.stop
        missing = drafts
        for attempt in range(self.responses.tries):
            ready = self._write_inputs(missing, sources, attempt, seed)
            prompts = [self._response_prompt(draft, sources, attempt, seed) for draft in ready]
            answer_seed = derive_seed(seed, "responses", attempt)
            answers = self._ask(sources.model, most, stop, prompts, answer_seed, "Responses")
            for draft, answer in zip(ready, answers, strict=True):
                draft.fault = answer.fault or self._complete(draft, answer.text, sources.template)
                if draft.fault is not None:
                    draft.row["response"] = answer.text
            missing = [draft for draft in missing if draft.fault is not None]

    def _write_inputs(
        self, drafts: Sequence[Draft], sources: _Sources, attempt: int, seed: int
    ) -> Sequence[Draft]:
        """Fill in inputs, of every second draft where a client has rows with and without; return drafts without fault."""
        if self._prompts.input is None:
            return drafts
        asked = []
        for draft in drafts:
            kinds = sorted({bool(row["input"]) for row in sources.rows[draft.client]})  # False first
            draft.row["input"] = ""  # of an earlier try
            if kinds and kinds[(draft.number + attempt) % len(kinds)]:  # another try, the other kind
                asked.append(draft)
        most, stop = self.responses.max_new_tokens, self._prompts.input.stop
        prompts = [self._response_prompt(draft, sources, attempt, seed, is_input=True) for draft in asked]
        answers = self._ask(
            sources.model, most, stop, prompts, derive_seed(seed, "inputs", attempt), "Inputs"
        )
        for draft, answer in zip(asked, answers, strict=True):
            draft.row["input"], draft.fault = self._prompts.read_input(answer.text), answer.fault
        failed = {id(draft) for draft in asked if draft.fault is not None}  # drafts have no hash
        return [draft for draft in drafts if id(draft) not in failed]

    def _response_prompt(
        self, draft: Draft, sources: _Sources, attempt: int, seed: int, is_input: bool = False
    ) -> Prompt:
        # Input and response of one try are asked with the same examples.
        rng = np.random.default_rng(derive_seed(seed, "response", draft.client, draft.number, attempt))
        instruction, given = draft.row["instruction"], None if is_input else draft.row["input"]
        shown = _draw_alternately(rng, sources.rows[draft.client], self.responses.demonstrations)
        return Prompt(
            draft.client,
            shown,
            lambda examples: self._prompts.write_response_prompt(examples, instruction, given),
        )

    def _complete(self, draft: Draft, text: str, template: Template) -> str | None:
        """Copy input and response of an answer into the draft, or return the fault."""
        read = self._prompts.read_response(text)
        if read is None or (read[0] and self.input_slot not in template.slots):
            return NO_MATCH
        draft.row |= {"input": read[0] or draft.row["input"], "response": read[1]}
        return None

    def _prompts_in(self, template: Template, model: AnswersPrompts) -> SelfGenerationPrompts:
        """Return prompts in the template; where it has the model's end of a turn, examples end with that."""
        turn = model.tokenizer.eos_token if isinstance(model, HoldsTokenizer) else None
        end = f"{turn}\n" if turn and turn in template.text else "\n\n"
        return prompts_in(template, end, self.instruction_slot, self.input_slot)

    def _ask(
        self,
        model: AnswersPrompts,
        max_new_tokens: int,
        stop: Sequence[str],
        prompts: list[Prompt],
        seed: int,
        label: str,
    ) -> list[Reply]:
        generator = BatchGenerator(
            model, max_new_tokens, stop, self.temperature, self.top_p, self.batch_size, self.keep_cut
        )
        answers = generator.generate(prompts, seed, label)
        self.notes[FEWER] += sum(
            0 < answer.num_demonstrations < len(prompt.demonstrations)
            for prompt, answer in zip(prompts, answers, strict=True)
        )
        return answers

    def _to_row(self, fields: Fields) -> Fields:
        return {
            "instruction": fields[self.instruction_slot],
            "input": fields.get(self.input_slot, "").strip(),
            "response": fields["response"],
        }

    def _to_fields(self, row: Fields, template: Template) -> dict[str, str]:
        named = {
            self.instruction_slot: row["instruction"],
            self.input_slot: row["input"],
            "response": row["response"],
        }
        return {name: named.get(name, "") for name in (*template.slots, "response")}


def _draw(rng: np.random.Generator, rows: Sequence[Fields], number: int) -> list[Fields]:
    """Return ``number`` of the rows, or all if there are fewer, in random order."""
    return [rows[index] for index in rng.permutation(len(rows))[:number]]


def _draw_alternately(rng: np.random.Generator, rows: Sequence[Fields], number: int) -> list[Fields]:
    """Return ``number`` random rows, alternately with and without an input; one kind fills up for the other.

    Examples:
        >>> rows = [{"input": text} for text in ("", "", "", "a", "")]
        >>> [row["input"] for row in _draw_alternately(np.random.default_rng(0), rows, 4)]
        ['a', '', '', '']
    """
    with_input = [row for row in rows if row["input"]]
    without = [row for row in rows if not row["input"]]
    half = min(len(with_input), (number + 1) // 2)
    rest = min(len(without), number - half)
    pairs = zip_longest(_draw(rng, with_input, number - rest), _draw(rng, without, rest))
    return [row for row in chain.from_iterable(pairs) if row is not None]
