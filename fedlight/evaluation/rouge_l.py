"""ROUGE-L between many texts.

Lin, "ROUGE: A Package for Automatic Evaluation of Summaries", ACL Workshop 2004, https://aclanthology.org/W04-1013/, as
rouge-score computes it (F1, no stemming, as in Self-Instruct, Wang et al., ACL 2023, https://arxiv.org/abs/2212.10560).
Its tokens are lower-case Latin letters and digits, so texts in other scripts have none.

rouge-score makes the tokens; rapidfuzz finds the longest common subsequences, much faster than rouge-score's table in
Python. The values equal rouge-score's to the last bit.
"""

import warnings
from collections.abc import Iterable, Sequence

import numpy as np

FEWEST_IN_PART = 5


class KnownTexts:
    """Known texts, each tokenized once, for comparison with new ones.

    Args:
        limit: largest ROUGE-L F1 of a new text with a known one, in [0, 1].

    Examples:
        >>> known = KnownTexts(limit=0.7)
        >>> known.add("Name a large planet.")
        >>> known.near("Name a planet."), known.near("Write a poem.")
        ('Name a large planet.', None)
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._texts: list[str] = []
        self._tokens: list[list[int]] = []
        self._numbers: dict[str, int] = {}

    def add(self, text: str) -> None:
        """Add a known text."""
        self._texts.append(text)
        self._tokens.append(_tokens(text, self._numbers))

    def near(self, text: str) -> str | None:
        """Return the first known text whose ROUGE-L F1 with this one exceeds the limit; None where there is none."""
        places = np.flatnonzero(_f1([_tokens(text, self._numbers)], self._tokens)[0] > self.limit)
        return self._texts[places[0]] if places.size else None

    def overlaps(self, text: str) -> bool:
        """Return whether this text or a known one is near a part of the other that is no longer than itself.

        A text with fewer than five tokens matches no part, since many long texts have a few common words.

        Examples:
            >>> known = KnownTexts(limit=0.7)
            >>> known.add("Name a planet with rings.")
            >>> known.overlaps("Stand up, name a planet with rings, and sit down again."), known.overlaps("Name rings.")
            (True, False)
        """
        from rapidfuzz.fuzz import partial_ratio

        tokens = _tokens(text, self._numbers)
        pairs = [known for known in self._tokens if min(len(known), len(tokens)) >= FEWEST_IN_PART]
        return any(partial_ratio(tokens, known) > 100 * self.limit for known in pairs)  # in percent


def pairwise_rouge_l(texts: Sequence[str], references: Sequence[str]) -> np.ndarray:
    """Return the ROUGE-L F1 of each text with each reference, ``(texts, references)``; compares equal texts once."""
    numbers: dict[str, int] = {}
    rows = {text: at for at, text in enumerate(dict.fromkeys(texts))}
    columns = {text: at for at, text in enumerate(dict.fromkeys(references))}
    table = _f1([_tokens(text, numbers) for text in rows], [_tokens(text, numbers) for text in columns])
    return table[[rows[text] for text in texts]][:, [columns[text] for text in references]]


def rouge_l_of_pairs(texts: Sequence[str], references: Sequence[str]) -> np.ndarray:
    """Return the ROUGE-L F1 of each text with the reference at its place, ``(texts,)``, in [0, 1]."""
    pairs = zip(texts, references, strict=True)
    return np.array([pairwise_rouge_l([text], [reference])[0, 0] for text, reference in pairs])


def warn_of_scripts(texts: Iterable[str], consequence: str) -> None:
    """Warn with a consequence where most letters of a text have no tokens."""
    letters = [[character.isascii() for character in text if character.isalnum()] for text in texts]
    if any(2 * sum(latin) < len(latin) for latin in letters):
        warnings.warn(
            f"ROUGE-L sees Latin letters and digits alone, and some texts are in other scripts: {consequence}",
            stacklevel=3,
        )


def tokenize(text: str) -> list[str]:
    """Return rouge-score's tokens of a text.

    Examples:
        >>> tokenize("The a-planet."), tokenize("你好")
        (['the', 'a', 'planet'], [])
    """
    from rouge_score.tokenize import tokenize as split

    return split(text, None)


def _tokens(text: str, numbers: dict[str, int]) -> list[int]:
    # rapidfuzz would compare texts by their hashes, which may collide.
    return [numbers.setdefault(token, len(numbers)) for token in tokenize(text)]


def _f1(texts: Sequence[Sequence[int]], references: Sequence[Sequence[int]]) -> np.ndarray:
    """Return the F1 of all pairs of tokenised texts, ``(texts, references)``."""
    from rapidfuzz.distance import LCSseq
    from rapidfuzz.process import cdist

    if not texts or not references:
        return np.zeros((len(texts), len(references)))
    common = cdist(texts, references, scorer=LCSseq.similarity).astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):  # texts without a token have nothing in common
        precision = common / np.array([[len(tokens)] for tokens in texts])
        recall = common / np.array([len(tokens) for tokens in references])
        # In the order of rouge-score's operations, so the values are equal to the last bit.
        return np.where(common > 0, 2 * precision * recall / (precision + recall), 0.0)
