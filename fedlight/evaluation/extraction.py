"""Measures of training data extraction: how much of the training texts a model's own texts repeat.

* Memory extraction: texts sampled behind the beginning of the prompt template, each compared with every training text.
  Carlini et al., "Extracting Training Data from Large Language Models", USENIX Security 2021,
  https://arxiv.org/abs/2012.07805. Wang et al. (FedDCA, https://arxiv.org/abs/2409.20135) report the mean over pairs. It
  says little, since a text that is copied word for word differs from all other texts; the mean of the best matches says
  more.
* Discoverable memorization: answers to training prompts, each compared with the true one. Nasr et al., "Scalable Extraction
  of Training Data from (Production) Language Models", https://arxiv.org/abs/2311.17035, as in Zhang et al. (FewFedPIT,
  https://arxiv.org/abs/2403.06131).
* Client extraction: texts of a client that looks for other clients' private items. Hu et al., Findings of IJCNLP-AACL 2025,
  https://arxiv.org/abs/2506.06060.
* Exposure of a planted secret. Carlini et al., "The Secret Sharer", USENIX Security 2019, https://arxiv.org/abs/1802.08232.

Texts are equal if they differ only in white space, which tokenizers do not keep.
"""

import math
import random
import re
from collections.abc import Mapping, Sequence
from string import Formatter
from typing import Any, NamedTuple, TypeVar

import numpy as np

from fedlight.evaluation.rouge_l import pairwise_rouge_l, rouge_l_of_pairs, warn_of_scripts
from fedlight.support.seeding import derive_seed
from fedlight.support.words import cut_at

T = TypeVar("T")
UNSEEN = "their rouge_l is about 0 even where a model repeats them, so read `exact`"


class Opening(NamedTuple):
    """Beginning of a template's texts."""

    # fixed text before the first slot of each form of the template; one of them begins every text
    prefixes: tuple[str, ...]
    stops: tuple[str, ...]  # fixed text after the first slots, without white space around it

    def body(self, text: str) -> str:
        r"""Return the part of a text between its prefix and a stop.

        Examples:
            >>> Opening(("Q:\n", "Question:\n"), ("A:",)).body("Question:\nHow  old?\n\nA: 7")
            'How  old?'
        """
        # The longest, since one prefix may begin another.
        prefix = max((prefix for prefix in self.prefixes if text.startswith(prefix)), key=len, default="")
        return cut_at(text[len(prefix) :], self.stops).strip()


def opening_of(forms: Sequence[str]) -> Opening:
    r"""Return the opening of a template, given its forms: texts with slots in braces behind a beginning; else ValueError.

    Examples:
        >>> opening_of(["### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:"])
        Opening(prefixes=('### Instruction:\n',), stops=('### Input:',))
        >>> opening_of(["POST : {instruction} {input}\nCHOICE :"])  # a blank is nothing to stop at
        Opening(prefixes=('POST :',), stops=('CHOICE :',))
    """
    prefixes, stops = [], []
    for form in forms:
        first, *later = _split_at_slots(form)
        if not later or not first.strip():
            raise ValueError(
                f"the template {form[:40]!r} has no text in front of its first slot with which to "
                "prompt a model: add some, or choose another attack"
            )
        # A blank belongs to the first word: tokenizers put the two into one token.
        prefixes.append(first.rstrip(" "))
        stops += [text.strip() for text in later if text.strip()][:1]
    return Opening(tuple(dict.fromkeys(prefixes)), tuple(dict.fromkeys(stops)))


def later_texts(form: str) -> list[str]:
    r"""Return the fixed texts of a template's form after its slots; slots with a blank between them are one.

    Examples:
        >>> later_texts("Q: {instruction} {input}\nA:"), later_texts("Q: {instruction}\nOf: {input}\nA:")
        (['\nA:'], ['\nOf: ', '\nA:'])
    """
    *between, last = _split_at_slots(form)[1:]
    return [*(text for text in between if text.strip()), last]


def _split_at_slots(form: str) -> list[str]:
    r"""Return the fixed texts of a template before, between and after its slots.

    Examples:
        >>> _split_at_slots("{{x}} Q: {prompt}\nA:")
        ['{x} Q: ', '\nA:']
    """
    texts = [""]
    for literal, slot, _, _ in Formatter().parse(form):  # doubled braces come in pieces, hence +=
        texts[-1] += literal
        if slot is not None:
            texts.append("")
    return texts


def normalize_space(text: str) -> str:
    """Return the text with one blank for each run of white space, and none around it."""
    return " ".join(text.split())


def compare_with_all(
    texts: Sequence[str], references: Sequence[str]
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Compare each of a model's texts with every reference, at least one.

    Returns:
        The metrics of memory extraction, each in [0, 1]: ``rouge_l``, the mean over all pairs; ``rouge_l_best``, the mean of
        the best matches; ``exact``, the share of texts that equal a reference; ``extracted``, the share of different
        references that a text equals. And a record of each text: ``text``, the ``mean`` and the ``best`` of its ROUGE-L with
        the references, ``nearest``, the best reference, and ``exact``, whether it equals one.
    """
    warn_of_scripts(references, UNSEEN)
    known = {normalize_space(reference) for reference in references}
    records = [
        {
            "text": text,
            "mean": float(row.mean()),
            "best": float(row.max()),
            "nearest": references[row.argmax()],
            "exact": normalize_space(text) in known,
        }
        for text, row in zip(texts, pairwise_rouge_l(texts, references), strict=True)
    ]
    columns = {"rouge_l": "mean", "rouge_l_best": "best", "exact": "exact"}
    means = {name: float(np.mean([record[column] for record in records])) for name, column in columns.items()}
    return means | {"extracted": len(known & set(map(normalize_space, texts))) / len(known)}, records


LEAST_DIGITS = 3
_NUMBER = r"[\w.:/+@-]*\d[\w.:/+@-]*"
# Numbers with one blank between them are one identifier, such as a telephone number.
_IDENTIFIER = re.compile(rf"{_NUMBER}(?: {_NUMBER})*")


def identifiers(text: str, known: str = "") -> list[str]:
    """Return the different numbers and codes of a text, with at least three digits, that ``known`` does not have.

    Examples:
        >>> identifiers("Record RX-4711 (born 12.05.1987, call 555 0199) of ward 12.", known="RX-4711 ?")
        ['12.05.1987', '555 0199']
    """
    codes = dict.fromkeys(code.strip(".:/+@- ") for code in _IDENTIFIER.findall(normalize_space(text)))
    long = [code for code in codes if sum(map(str.isdigit, code)) >= LEAST_DIGITS]
    return [code for code in long if not contains_identifier(known, code)]


def contains_identifier(text: str, identifier: str) -> bool:
    """Return whether a text contains the identifier, with no letter or digit directly before or after it.

    Examples:
        >>> [contains_identifier(text, "4711") for text in ("It is 4711.", "It is 47110.", "RX4711")]
        [True, False, False]
    """
    return re.search(rf"(?<!\w){re.escape(identifier)}(?!\w)", normalize_space(text)) is not None


def span_of(text: str, code: str) -> tuple[int, int]:
    r"""Return begin and end of an identifier's first place in its text, where other white space may stand for a blank.

    Examples:
        >>> span_of("Call 555 01, or 555\n0199.", "555 0199")
        (16, 24)
    """
    words = r"\s+".join(map(re.escape, code.split()))
    match = re.search(rf"(?<!\w){words}(?!\w)", text)
    if match is None:
        raise ValueError(f"{code!r} is not in {text!r}")
    return match.span()


def last_words(text: str, number: int | None) -> str:
    r"""Return the end of a text from its n-th last word on; the whole text if it has fewer, or for None.

    Examples:
        >>> last_words("Of Mara Lind:\nborn on", 3), last_words("born", 3)
        ('Lind:\nborn on', 'born')
    """
    starts = [word.start() for word in re.finditer(r"\S+", text)]
    return text if number is None or len(starts) <= number else text[starts[-number] :]


def are_written(codes: Sequence[str], texts: Sequence[str]) -> list[bool]:
    """Return of each identifier, or planted secret, whether a text contains it; see `contains_identifier`.

    Examples:
        >>> are_written(["4711", "555 0199"], ["It is 4711.", "Call 555 01999."])
        [True, False]
    """
    tidy, codes = ([normalize_space(each) for each in side] for side in (texts, codes))
    # The plain search first: a thousand codes in a hundred texts take 0.04 s instead of 0.4 s.
    return [any(code in text and contains_identifier(text, code) for text in tidy) for code in codes]


def recalls(answers: Sequence[str], truths: Sequence[str]) -> list[dict[str, Any]]:
    """Return of each answer ``rouge_l`` with the true one at its index, in [0, 1], and ``exact``, whether both are equal."""
    warn_of_scripts(truths, UNSEEN)
    scores = rouge_l_of_pairs(answers, truths).tolist()
    return [
        {"rouge_l": score, "exact": normalize_space(answer) == normalize_space(truth)}
        for score, answer, truth in zip(scores, answers, truths, strict=True)
    ]


def exposure(log_prob: float, others: Sequence[float]) -> float:
    """Return the exposure of a planted secret in bits, 1.4 on average if it was never seen.

    log2 of the number of candidates, the secret and at least one random other, minus log2 of the secret's rank by
    log-probability; equally likely candidates rank before it, and so do all where the model gives NaN.

    Examples:
        >>> exposure(-1.0, [-2.0, -3.0, -4.0]), exposure(-3.5, [-2.0, -3.0, -4.0])
        (2.0, 0.415...)
    """
    rank = 1 + sum(not other < log_prob for other in others)  # of equals the secret is the last
    return math.log2(len(others) + 1) - math.log2(rank)


def round_robin(rows: Mapping[str, Sequence[T]], number: int, seed: int) -> list[tuple[str, T]]:
    """Return up to ``number`` rows of the clients in turn; clients and rows have an order drawn by seed and names."""
    clients = sorted(rows)
    random.Random(derive_seed(seed, "clients' turn")).shuffle(clients)
    drawn = {
        client: random.Random(derive_seed(seed, "rows' turn", client)).sample(rows[client], len(rows[client]))
        for client in clients
    }
    longest = max((len(client_rows) for client_rows in drawn.values()), default=0)
    turns = [
        (client, drawn[client][turn])
        for turn in range(longest)
        for client in clients
        if turn < len(drawn[client])
    ]
    return turns[:number]
