"""Templates for unknown rows, and choice words that are single tokens of a model's tokenizer."""

from collections.abc import Container
from typing import Any

from fedlight.datamodules.text.chat import Chat, read_turns, write_turns
from fedlight.datamodules.text.encoding import choice_ids
from fedlight.datamodules.text.templates import CHAT, MESSAGES, Template, check_choice
from fedlight.datamodules.text.tokens import encode
from fedlight.first_config.columns import Guess, GuessError

CHOICES = [("A", "B"), ("a", "b"), ("1", "2"), ("X", "Y"), ("x", "y")]
CHOICES += [("left", "right"), ("first", "second"), ("I", "you")]
"""Words for two answers, the usual ones first."""
SHORT = 1024  # models of at most these positions get a short template


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
