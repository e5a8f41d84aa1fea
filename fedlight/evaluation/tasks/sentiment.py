"""Sentiment of financial news and tweets in the three forms of FinGPT: FPB, FiQA and TFNS.

H. Yang, X.-Y. Liu and C. Wang, "FinGPT: Open-Source Financial Large Language Models", 2023,
https://arxiv.org/abs/2306.06031. Instructions, labels and thresholds are those of the project's benchmark
(https://github.com/AI4Finance-Foundation/FinGPT, ``fingpt/FinGPT_Benchmark/benchmarks``):

=====  ==================================  ===================================================================
set    hub name                            labels
=====  ==================================  ===================================================================
fpb    takala/financial_phrasebank          0 negative, 1 neutral, 2 positive (Malo et al. 2014)
fiqa   pauri32/fiqa-2018                    a score in [-1, 1]: negative below -0.1, positive from 0.1 on
tfns   zeroshot/twitter-financial-news-     0 negative (bearish), 1 positive (bullish), 2 neutral
       sentiment
=====  ==================================  ===================================================================

Deviation: answers are read strictly. FinGPT reads an answer with neither "positive" nor "negative" as neutral, so a model
that answers nothing gets the score of the most frequent label. Here such an answer counts as wrong and as unread.
"""

import re
from typing import Any, Literal

from fedlight.evaluation.tasks.exact_match import text_of
from fedlight.evaluation.tasks.result import Verdict
from fedlight.evaluation.tasks.task import Example, Prompts, Task
from fedlight.support.types import Row

LABELS = ("negative", "neutral", "positive")
INSTRUCTION = (
    "What is the sentiment of this {kind}? Please choose an answer from {{negative/neutral/positive}}."
)
CODES = {
    "fpb": {"0": "negative", "1": "neutral", "2": "positive"},
    "tfns": {"0": "negative", "1": "positive", "2": "neutral"},
}
THRESHOLD = 0.1


class Sentiment(Task):
    """Task of texts with a sentiment; the rows have ``text``, ``label`` and, for FiQA, ``format`` ("post" or "headline").

    Args:
        data: rows as above; a label is a word, or coded as in ``coding``.
        coding: ``fpb``, ``fiqa`` or ``tfns``: the coding of the labels and the name of the texts.
        options: see `Task`.
    """

    answer_tokens = 8

    def __init__(self, data: Prompts, coding: Literal["fpb", "fiqa", "tfns"], **options: Any) -> None:
        super().__init__(data, **options)
        self.coding = coding
        self.names = ("text", "label", *(["format"] if coding == "fiqa" else []))

    def example(self, row: Row) -> Example:
        """Return FinGPT's instruction, the text as its input, and the label as a word."""
        is_tweet = row["format"] == "post" if self.coding == "fiqa" else self.coding == "tfns"
        instruction = INSTRUCTION.format(kind="tweet" if is_tweet else "news")
        target = label_of(row["label"], self.coding)
        return Example({"instruction": instruction, "input": text_of(row["text"])}, target, choices=LABELS)

    def score(self, example: Example, answer: str) -> Verdict:
        """Score 1 for an answer that names the right label only."""
        read = label_in(answer)
        return Verdict(float(read == example.target), read)


def label_of(value: Any, coding: str) -> str:
    """Return the word for a label: a word, a number in the set's coding, or a score for FiQA; ValueError for others.

    Examples:
        >>> label_of(1, "fpb"), label_of(1, "tfns"), label_of("Positive", "tfns")
        ('neutral', 'positive', 'positive')
        >>> label_of(-0.1, "fiqa"), label_of(-0.11, "fiqa"), label_of(0.1, "fiqa")
        ('neutral', 'negative', 'positive')
    """
    text = text_of(value).lower()
    if text in LABELS:
        return text
    if coding == "fiqa":
        try:
            score = float(text)
        except ValueError:
            score = float("nan")  # fails the comparison
        if -1 <= score <= 1:
            return "negative" if score < -THRESHOLD else "neutral" if score < THRESHOLD else "positive"
        raise ValueError(f"the label {value!r} is neither a word nor a score in [-1, 1]")
    if text not in CODES[coding]:
        raise ValueError(f"the label {value!r} is neither one of {', '.join(LABELS)} nor one of 0, 1, 2")
    return CODES[coding][text]


def label_in(answer: str) -> str | None:
    """Return the one label that an answer names; None where it names none or two.

    Examples:
        >>> label_in(" Positive."), label_in("The sentiment is neutral"), label_in("negative or neutral"), label_in("bad")
        ('positive', 'neutral', None, None)
    """
    labels = {word for word in re.findall(r"[a-z]+", answer.lower()) if word in LABELS}
    return labels.pop() if len(labels) == 1 else None
