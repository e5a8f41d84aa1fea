"""Judge that asks a text generator: it rates both answers in four respects, or gives a verdict in one word.

Ratings: the answer with the higher mean is the better one.
Z. Zhang et al., "FewFedPIT: Towards Privacy-preserving and Few-shot Federated Instruction Tuning",
https://arxiv.org/abs/2403.06131, section 4.1 and appendix B, after Zheng et al., "Judging LLM-as-a-Judge with MT-Bench and
Chatbot Arena", NeurIPS 2023, https://arxiv.org/abs/2306.05685. The prompt is in our own words. A reply is read strictly:
it ends with two lines of a fixed form; any other reply counts as unread. Verdicts, and the mark that both forms have: see
`fedlight.judges.pairwise`.
"""

import math
import re
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Literal

from lightning.pytorch.utilities import rank_zero_info

from fedlight.datamodules.text.templates import Template
from fedlight.evaluation.judge import Judge, check_slots
from fedlight.evaluation.win_rate import wins
from fedlight.generators.endpoint import TextGenerator
from fedlight.judges.pairwise import TASK, last_lines, mark_of, pairwise_prompt, read_verdict, without_tags
from fedlight.support.types import Fields

ASPECTS = ("helpfulness", "relevance", "correctness", "coherence")
LOWEST, HIGHEST = 1, 10

INSTRUCTIONS = (
    TASK
    + """\
<answer_1>
{first}
</answer_1>

<answer_2>
{second}
</answer_2>

Rate both answers from {lowest} (worst) to {highest} (best) in each of these respects: {aspects}. \
Equal ratings are allowed. You may think first, in a few sentences. Then end with exactly these two lines, with numbers in \
place of N:
ANSWER 1 {mark}: {form}
ANSWER 2 {mark}: {form}"""
)


class ChatJudge(Judge):
    """Judge that asks a `fedlight.generators.endpoint.ChatEndpoint` with ``sampling: {temperature: 0}``, or a local model.

    Equal answers are not shown. Earlier replies come from the endpoint's cache, so a stopped judgement resumes. The
    costs of an endpoint are logged before the first request.

    Args:
        endpoint: text generator that is asked; its ``sampling.max_new_tokens`` must leave room for a few sentences and the
            verdict.
        question: part of the prompt that the judge sees, a text with slots; ``{prompt}`` is the whole prompt of the models.
        form: ``ratings`` of both answers, or a ``verdict`` in one word.

    Attributes:
        unread: number of replies so far that could not be read.

    Raises:
        ValueError: ``form`` is misspelt; at a verdict, a slot of ``question`` is not among the fields, or a limit of the
            endpoint would be passed.
        OSError: at a verdict, the endpoint cannot be reached, or failed too often.
    """

    def __init__(
        self,
        endpoint: TextGenerator,
        question: str = "{instruction}\n\n{input}",
        form: Literal["ratings", "verdict"] = "ratings",
    ) -> None:
        self.endpoint, self.question, self.form = endpoint, Template.named(question), form
        self.unread = 0
        self._announced = False

    def verdicts(self, fields: Sequence[Fields], ours: Sequence[str], theirs: Sequence[str]) -> list[float]:
        if not self._announced:
            self.announce(fields, ours, theirs)
        texts = self._texts(fields, ours, theirs)
        prompts = self._prompts(texts)
        replies = self.endpoint.complete(list(prompts.values()))
        verdicts = [0.5] * len(ours)  # equal answers are not shown
        for index, reply in zip(prompts, replies, strict=True):
            mark = mark_of(*texts[index])
            if self.form == "ratings":
                ratings = read_ratings(reply, mark)
                verdict = None if ratings is None else wins(ratings[:1], ratings[1:])[0]
            else:
                verdict = read_verdict(reply, mark, texts[index])
            verdicts[index] = math.nan if verdict is None else verdict
        self._count_unread(
            [r for i, r in zip(prompts, replies, strict=True) if math.isnan(verdicts[i])], len(prompts)
        )
        return verdicts

    def announce(self, fields: Sequence[Fields], ours: Sequence[str], theirs: Sequence[str]) -> None:
        """Log once the place and the costs of sending prompts and answers; raises as `verdicts`."""
        costs = self.endpoint.costs(list(self._prompts(self._texts(fields, ours, theirs)).values()))
        if self._announced:  # the costs raise each time
            return
        self._announced = True
        if self.endpoint.sends_to:
            rank_zero_info(f"ChatJudge: the prompts and answers to be judged go to {self.endpoint.sends_to}")
        if costs is not None and costs.requests:
            rank_zero_info(f"ChatJudge: {costs}")

    def _texts(
        self, fields: Sequence[Fields], ours: Sequence[str], theirs: Sequence[str]
    ) -> dict[int, tuple[str, str, str]]:
        """Return index -> question and answers of the pairs whose answers differ."""
        check_slots(self.question.slots, fields, "ChatJudge")
        return {
            index: (self.question.render(slots).text.strip(), a.strip(), b.strip())
            for index, (slots, a, b) in enumerate(zip(fields, ours, theirs, strict=True))
            if a.strip() != b.strip()
        }

    def _prompts(self, texts: Mapping[int, tuple[str, str, str]]) -> dict[int, str]:
        write = judge_prompt if self.form == "ratings" else pairwise_prompt
        return {index: write(*of_pair) for index, of_pair in texts.items()}

    def _count_unread(self, replies: Sequence[str], asked: int) -> None:
        self.unread += len(replies)
        if replies:
            rank_zero_info(
                f"ChatJudge: {len(replies)} of {asked} replies could not be read, such as one that ends "
                f"{replies[0][-80:]!r}; an empty one was cut off at the endpoint's sampling.max_new_tokens or refused"
            )


def judge_prompt(question: str, first: str, second: str) -> str:
    """Return the prompt of a judge that rates; of the texts, only tags of the prompt are changed."""
    form = ", ".join(f"{aspect}=N" for aspect in ASPECTS)
    return INSTRUCTIONS.format(
        question=without_tags(question),
        first=without_tags(first),
        second=without_tags(second),
        lowest=LOWEST,
        highest=HIGHEST,
        aspects=", ".join(ASPECTS),
        form=form,
        mark=mark_of(question, first, second),
    )


def read_ratings(reply: str, mark: str) -> tuple[float, float] | None:
    r"""Return the mean ratings of the first and the second answer, each in [1, 10]; None if their form is wrong.

    The last two lines are those of the answers, with the mark. Each has all respects in order and ratings in the range.

    Examples:
        >>> line = "helpfulness={}, relevance=8, correctness=8, coherence=10"
        >>> read_ratings(f"Both are short.\nANSWER 1 1f: {line.format(6)}\r\nANSWER 2 1f: {line.format(2)}", "1f")
        (8.0, 7.0)
        >>> read_ratings(f"ANSWER 1 1f: {line.format(6)}\nANSWER 2 1f: {line.format(11)}", "1f")
    """
    number = r"(\d{1,2}(?:\.\d+)?)"  # 1 to 10, with decimals
    form = ",[ \t]*".join(rf"{aspect}[ \t]*=[ \t]*{number}" for aspect in ASPECTS)
    means = []
    for which, line in enumerate(last_lines(reply, 2), 1):
        match = re.fullmatch(rf"ANSWER {which}[ \t]+{mark}:[ \t]*{form}", line, re.IGNORECASE)
        ratings = [float(rating) for rating in match.groups()] if match else []
        if not ratings or not all(LOWEST <= rating <= HIGHEST for rating in ratings):
            return None
        means.append(fmean(ratings))
    return (means[0], means[1]) if len(means) == 2 else None  # one line is no reply
