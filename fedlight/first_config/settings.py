"""Settings for unknown rows: templates, choice words that are single tokens of a model, numbers by their size."""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedlight.datamodules.text.chat import Chat, read_turns, write_turns
from fedlight.datamodules.text.encoding import choice_ids
from fedlight.datamodules.text.templates import CHAT, MESSAGES, Template, check_choice
from fedlight.datamodules.text.tokens import encode
from fedlight.first_config.columns import Guess, GuessError

CHOICES = [("A", "B"), ("a", "b"), ("1", "2"), ("X", "Y"), ("x", "y")]
CHOICES += [("left", "right"), ("first", "second"), ("I", "you")]
"""Words for two answers, the usual ones first."""
SHORT = 1024  # models of at most these positions get a short template
LOCAL_STEPS = 5
FEWEST_ROUNDS, MOST_ROUNDS = 6, 12
LARGEST_BATCH = 8
MOST_IN_A_ROUND = 5
MOST_TOKENS = 1024
VALIDATED = 500  # examples of validation in all, about


def has_chat(tokenizer: Any) -> bool:
    """Return whether a tokenizer has a chat template that a model can learn answers in."""
    try:
        return bool(tokenizer.chat_template) and not Chat.of(tokenizer).fault
    except ValueError:  # several templates, none of them the default
        return False


def show(template: Template, columns: Container[str], talk: str = "") -> str:
    """Return a prompt with its answer, with names in braces in place of texts; the template knows its tokenizer.

    ``talk`` is a conversation of `write_turns` up to its last answer; its turns are shown by their roles.
    """
    slots = (*template.slots, "response_a", "response_b")
    texts = {slot: "" if slot == "input" and slot not in columns else f"{{{slot}}}" for slot in slots}
    if MESSAGES in template.slots:
        turns = [{**turn, "content": f"{{{turn['role']}}}"} for turn in read_turns(talk)]
        texts[MESSAGES] = write_turns(turns)
    answer = " {choice}" if template.opening else template.continuation("{response}") + template.closing
    return template.render(texts, answer).text


def choice_template(has_question: bool, choices: tuple[str, str], chat: bool = False) -> str:
    r"""Return a template of comparisons, which ends with a colon; ``chat``: in the model's chat template.

    Examples:
        >>> choice_template(False, ("a", "b"))
        'Which answer is better?\nANSWER a: {response_a}\nANSWER b: {response_b}\nCHOICE:'
    """
    question = "QUESTION: {prompt}\n" * has_question
    answers = f"ANSWER {choices[0]}: {{response_a}}\nANSWER {choices[1]}: {{response_b}}"
    return f"{CHAT}:" * chat + f"Which answer is better?\n{question}{answers}\nCHOICE:"


def response_template(
    has_input: bool, positions: int | None, slot: str = "instruction", chat: bool = False
) -> tuple[str, str]:
    r"""Return a template of instructions, a name or a text, and why.

    Examples:
        >>> response_template(True, 32768)
        ('alpaca', 'the usual one; rows without input have its shorter form')
        >>> response_template(False, 512, "prompt")[0]
        'QUESTION: {prompt}\nANSWER:'
    """
    if chat:
        return CHAT, "the model's own chat template, in which it was tuned"
    if positions is not None and positions <= SHORT:
        middle = "\nINPUT: {input}" if has_input else ""
        return f"QUESTION: {{{slot}}}{middle}\nANSWER:", f"short, as the model has {positions:,} positions"
    if has_input:
        return "alpaca", "the usual one; rows without input have its shorter form"
    if slot == "instruction":
        return "alpaca_no_input", "the usual one, without an input"
    return f"### Instruction:\n{{{slot}}}\n\n### Response:", "as Alpaca's, without its introduction"


def find_choices(
    tokenizer: Any, has_question: bool, given: tuple[str, str] | None, template: str | None
) -> Guess:
    """Return two words for A and B that are single tokens after the template's end.

    Raises:
        GuessError: neither the given words nor any other pair are.
        ValueError: the given template has no slots for both answers, or no colon at its end.
    """
    tried = (given,) if given else CHOICES
    split, chat = [], has_chat(tokenizer)
    for words in tried:
        # Made anew, because fedlight's template names the words.
        shape = Template.named(template or choice_template(has_question, words, chat), asks="choice")
        check_choice(shape)  # a template of the user's
        shape = shape.for_tokenizer(tokenizer)
        try:
            choice_ids(tokenizer, shape, words)
        except ValueError:
            split.append(words)
            continue
        reason = "given with --choices" if given else "the usual ones"
        if split and not given:
            reason = f"{' and '.join(split[0])} are several tokens or unknown here"
        return Guess("choice tokens", words, f"{reason}; each is one token of this model")
    pieces = len(encode(tokenizer, [f": {tried[0][0]}"])[0].ids)  # as after the template's end
    raise GuessError(
        f"none of {', '.join(' and '.join(words) for words in tried)} are single tokens of this model ({tried[0][0]!r} "
        f"after a colon makes {pieces} tokens with it): name two words that are with --choices WORD WORD, or another --model"
    )


@dataclass(frozen=True)
class Sizes:
    """Numbers of a first run."""

    clients: int  # clients with rows
    clients_per_round: int  # of them in a round
    rounds: int  # rounds
    batch_size: int  # examples of an optimizer step; even
    local_steps: int  # optimizer steps of a visit
    val_max: int  # most examples of a client in validation


def choose_sizes(rows_of_clients: Sequence[int]) -> Sizes:
    """Return numbers for a first run of minutes, for clients with these numbers of examples.

    Examples:
        >>> choose_sizes([100] * 300)
        Sizes(clients=300, clients_per_round=5, rounds=12, batch_size=8, local_steps=5, val_max=2)
        >>> choose_sizes([6, 9, 7])
        Sizes(clients=3, clients_per_round=3, rounds=6, batch_size=4, local_steps=5, val_max=166)
    """
    clients, median = len(rows_of_clients), float(np.median(rows_of_clients))
    a_round = min(clients, MOST_IN_A_ROUND)
    # Half of the clients fill a batch. It is even, since both orders of a pair are in one.
    batch = max(2, min(LARGEST_BATCH, 1 << int(np.log2(max(median, 1)))))
    passes = sum(rows_of_clients) / (a_round * LOCAL_STEPS * batch)
    rounds = int(np.clip(np.ceil(passes), FEWEST_ROUNDS, MOST_ROUNDS))
    return Sizes(clients, a_round, rounds, batch, LOCAL_STEPS, max(2, VALIDATED // clients))


def explain(sizes: Sizes, rows_of_clients: Sequence[int]) -> list[Guess]:
    """Return the numbers with their reasons."""
    low, middle, high = (f"{value:,.0f}" for value in np.percentile(rows_of_clients, (0, 50, 100)))
    clients = f"{sizes.clients:,}, {sizes.clients_per_round} in a round"
    rounds = f"{sizes.rounds} of {sizes.local_steps} steps with {sizes.batch_size} examples"
    reason = f"a first run: one pass, but {FEWEST_ROUNDS} to {MOST_ROUNDS} rounds; half of the clients fill a batch"
    spread = f"{low} to {high} rows each, {middle} in the middle"
    return [Guess("clients", clients, spread, sure=sizes.clients > 1), Guess("rounds", rounds, reason)]


def choose_tokens(lengths: Sequence[int], positions: int | None) -> tuple[int, float]:
    """Return ``max_tokens`` for texts of these lengths, with the end token, and the share of them that fits into it.

    Examples:
        >>> choose_tokens([40] * 99 + [5000], 32768), choose_tokens([40, 600], 512)
        ((64, 0.99), (512, 0.5))
    """
    limit = min(positions or MOST_TOKENS, MOST_TOKENS)
    wanted = int(np.ceil((np.percentile(lengths, 95) + 2) / 32)) * 32
    size = min(max(wanted, 64), limit)  # a text beyond the positions has no place in the model
    return size, float(np.mean(np.asarray(lengths) <= size))
