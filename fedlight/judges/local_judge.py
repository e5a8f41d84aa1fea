"""Judge that compares likelihoods of verdicts under a language model on this machine; nothing leaves the machine.

The prompt is that of `fedlight.judges.pairwise`, and the model continues with ``A``, ``B`` or ``tie``. For a model that
should think before it answers, give `ChatJudge` a `LocalGenerator`.
"""

import math
from collections.abc import Sequence
from typing import Literal

from lightning.pytorch.utilities import rank_zero_info

from fedlight.datamodules.text.templates import Template
from fedlight.devices.hardware import choose_device
from fedlight.evaluation.judge import Judge, check_slots
from fedlight.evaluation.tasks.model import Likelihood
from fedlight.evaluation.win_rate import wins
from fedlight.generators.local_generator import make_ready
from fedlight.judges.pairwise import AT_ONCE, WORDS, pairwise_prompt
from fedlight.modules.language.base_model import Execution
from fedlight.modules.sft import SFTModule
from fedlight.support.checks import refuse_below
from fedlight.support.needs import ReadsModel
from fedlight.support.types import Fields

VERDICT = AT_ONCE.rpartition("\n")[2]  # in a chat it begins the answer
CONTINUATIONS = [f" {word}" for word in WORDS]  # the blank belongs to the word's token


class LocalJudge(ReadsModel, Judge):
    """Judge that takes the likeliest of three verdicts; the model is loaded at the first pair to be read.

    A pair that does not fit into the model is not read, nor one where it gives NaN, nor, unless ``forced``, one where a
    text other than a verdict is likelier. The first of each kind is logged.

    Args:
        model: hub name, folder, or ``"toy"``.
        adapter: folder of an adapter on the model, if any.
        base: ``plain``, ``int8`` or ``nf4``: the number form of its weights.
        question: part of the prompt that the judge sees, a text with slots; ``{prompt}`` is the whole prompt of the models.
        chat: put the question into the tokenizer's chat template, for an instruction-tuned model.
        forced: take the likeliest of the three verdicts, even if another text is likelier.
        orders: ``one``: the likeliest verdict on the order that is asked for; or ``both``: the log-odds of A over B in one
            order less those in the other, so the model's preference for a letter cancels. Then no verdict is a tie.
        most_words: most words shown of each answer, for models with few positions; None: all.
        batch_size: pairs per call of the model.
        dtype: ``auto``, ``fp32``, ``bf16`` or ``fp16``.
        device: ``auto`` is the GPU where there is one.
        trust_remote_code: run code that comes with the model.

    Attributes:
        too_long: number of pairs so far that did not fit.
        unread: number of other pairs so far that were not read.

    Raises:
        ValueError: a setting is misspelt or out of range; at a verdict, a slot of ``question`` is not among the fields, or
            there is no chat template.
        OSError: at a verdict, there is no such model.
    """

    def __init__(
        self,
        model: str,
        adapter: str | None = None,
        base: str = "plain",
        question: str = "{instruction}\n\n{input}",
        chat: bool = False,
        forced: bool = True,
        orders: Literal["one", "both"] = "one",
        most_words: int | None = None,
        batch_size: int = 64,
        dtype: str = "auto",
        device: str = "auto",
        trust_remote_code: bool = False,
    ) -> None:
        refuse_below(1, "LocalJudge.", batch_size=batch_size, most_words=most_words)
        choose_device(device)  # refuses one that is not there
        if orders == "both" and not forced:
            raise ValueError("orders='both' compares A and B alone: leave forced=false out")
        self.model, self.chat, self.forced, self.device = model, chat, forced, device
        self.orders, self.sees_order = orders, orders == "one"
        self.question, self.most_words, self.batch_size = Template.named(question), most_words, batch_size
        self.too_long = self.unread = 0
        self._module = SFTModule(
            model,
            base=base,
            dtype=dtype,
            adapter=adapter,
            execution=Execution(trust_remote_code=trust_remote_code),
        )
        self._module.check_one_adapter()

    def verdicts(self, fields: Sequence[Fields], ours: Sequence[str], theirs: Sequence[str]) -> list[float]:
        check_slots(self.question.slots, fields, "LocalJudge")
        pairs = list(zip(fields, ours, theirs, strict=True))
        asked = [index for index, (_, a, b) in enumerate(pairs) if a.strip() != b.strip()]
        verdicts = [0.5] * len(pairs)  # equal answers are not shown
        for start in range(0, len(asked), self.batch_size):
            rows = asked[start : start + self.batch_size]
            for row, verdict in zip(rows, self._read([pairs[row] for row in rows]), strict=True):
                verdicts[row] = verdict
        return verdicts

    def _read(self, pairs: Sequence[tuple[Fields, str, str]]) -> list[float]:
        asked = self._ask(pairs)
        swapped = asked
        if self.orders == "both":
            swapped = self._ask([(fields, theirs, ours) for fields, ours, theirs in pairs])
        verdicts, too_long = [], 0
        for words, other in zip(asked, swapped, strict=True):
            if words is None or other is None:
                verdicts.append(math.nan)  # one of the two prompts does not fit
                too_long += 1
            elif self.orders == "both":
                verdicts.append(by_both_orders(words, other))
            else:
                verdicts.append(self._verdict(words))
        self._count(sum(map(math.isnan, verdicts)) - too_long, too_long)
        return verdicts

    def _ask(self, pairs: Sequence[tuple[Fields, str, str]]) -> list[Sequence[Likelihood] | None]:
        """Return the likelihoods of the verdicts on each pair; None for a pair that does not fit."""
        module = self._loaded()
        prompts = [self._prompt(*pair) for pair in pairs]
        fits = module.fits(prompts, new_tokens=8)  # room for the longest verdict
        kept = [prompt for prompt, does in zip(prompts, fits, strict=True) if does]
        likelihoods = iter(module.log_likelihoods(kept, [CONTINUATIONS] * len(kept)) if kept else [])
        return [next(likelihoods) if does else None for does in fits]

    def _verdict(self, words: Sequence[Likelihood]) -> float:
        verdict = likeliest([word.log_prob for word in words])
        return verdict if self.forced or any(word.greedy for word in words) else math.nan

    def _prompt(self, fields: Fields, first: str, second: str) -> str:
        question = self.question.render(fields).text.strip()
        text = pairwise_prompt(question, self._shown(first), self._shown(second), at_once=True)
        if not self.chat:
            return text
        # In a chat the word before the verdict begins the answer, instead of ending the question.
        return self._asked.render({"prompt": text.removesuffix(VERDICT)}, VERDICT).text

    def _shown(self, answer: str) -> str:
        return answer.strip() if self.most_words is None else " ".join(answer.split()[: self.most_words])

    def _loaded(self) -> SFTModule:
        if self._module.network is None:
            make_ready(self._module, self.device)
            if self.chat and not self._module.tokenizer.chat_template:
                raise ValueError(
                    f"LocalJudge.chat=true, but the tokenizer of model={self.model!r} has no chat template: set it to false"
                )
            if self.chat:
                self._asked = Template.named("chat", asks="prompt").for_tokenizer(self._module.tokenizer)
        return self._module

    def _count(self, unread: int, too_long: int) -> None:
        if too_long and not self.too_long:
            rank_zero_info(
                "LocalJudge: there are pairs that do not fit into the model; they are not read: set most_words"
            )
        if unread and not self.unread:
            rank_zero_info("LocalJudge: there are pairs to which the model would not answer A, B or tie")
        self.too_long += too_long
        self.unread += unread


def by_both_orders(as_a: Sequence[Likelihood], as_b: Sequence[Likelihood]) -> float:
    """Return 1 where the answer shown as A first, and as B then, has the higher log-odds over both orders, 0 where lower.

    Equal odds give 0.5, and NaN among them NaN.

    Examples:
        >>> says = lambda a, b: [Likelihood(a, 1, False), Likelihood(b, 1, False)]
        >>> by_both_orders(says(-0.1, -2.6), says(-0.2, -2.4)), by_both_orders(says(-1.0, -2.0), says(-1.0, -2.0))
        (1.0, 0.5)
    """
    odds = [words[0].log_prob - words[1].log_prob for words in (as_a, as_b)]  # of A over B
    return math.nan if math.isnan(odds[0] - odds[1]) else wins(odds[:1], odds[1:])[0]


def likeliest(log_probs: Sequence[float]) -> float:
    """Return the likeliest of the verdicts ``A`` (1), ``B`` (0) and ``tie`` (0.5) by log-probability; a tie if two tie.

    NaN where one of them is NaN.

    Examples:
        >>> likeliest([-1.0, -2.0, -3.0]), likeliest([-2.0, -1.0, -1.5]), likeliest([-1.0, -1.0, -4.0])
        (1.0, 0.0, 0.5)
    """
    if any(map(math.isnan, log_probs)):
        return math.nan
    best = [worth for worth, value in zip(WORDS.values(), log_probs, strict=True) if value == max(log_probs)]
    return best[0] if len(best) == 1 else 0.5
