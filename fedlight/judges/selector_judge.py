"""Judge that asks a trained selector."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info

from fedlight.datamodules.preferences.completions import ShownPairs
from fedlight.datamodules.preferences.labelling import Orders, gather, majority
from fedlight.datamodules.text.encoding import Comparison, encode_choice
from fedlight.datamodules.text.examples import collate_choices
from fedlight.datamodules.text.templates import Template, check_choice
from fedlight.datamodules.text.tokens import pad_id
from fedlight.devices.hardware import choose_device
from fedlight.evaluation.judge import Judge, check_slots
from fedlight.generators.local_generator import make_ready
from fedlight.modules.selector import SelectorModule, check_odd, refuse_one_order
from fedlight.pretrained.hub import load_tokenizer
from fedlight.support.checks import refuse_below
from fedlight.support.needs import ReadsModel
from fedlight.support.types import Fields


class SelectorJudge(ReadsModel, Judge):
    """Judge that asks a trained selector, or takes the majority of several adapters.

    Pairs are shown as ``CompletionPairDataModule`` shows them, and votes are counted as for labels. Inputs that are cut, and
    pairs that do not fit into ``max_tokens`` and are not read, are counted, and logged the first time. The model is loaded
    at the first pair to be read.

    Args:
        adapter: folder of one adapter, or of several.
        model: the selector's base: hub name, folder, or ``"toy"``.
        base: ``plain``, ``int8`` or ``nf4``.
        choice_template: name or text of the template of the selector's training.
        choices: the two labels of that training.
        max_tokens: most tokens of a pair, as in that training.
        orders: ``both``: show each pair in both orders, so that a preference for the first position cancels; or ``one``.
        letters: file of ``calibrate_letters`` for these selectors; None: as they were trained.
        trim: slot that is cut in a pair that is too long, see `PreferenceDataModule`; None: such a pair is not read.
        dtype: number type of the base: ``auto``, ``fp32``, ``bf16`` or ``fp16``.
        batch_size: sequences per forward pass.
        device: ``auto`` is the GPU where there is one.

    Attributes:
        too_long: number of pairs so far that did not fit.
        trimmed: number of inputs so far that were cut; a pair has two, one for each order.

    Raises:
        FileNotFoundError: there is no such adapter.
        ValueError: a setting is misspelt, out of range or not that of the selectors' training, or their number is even; at a
            verdict, a slot of the template is not among the fields.
    """

    def __init__(
        self,
        adapter: str,
        model: str = "toy",
        base: str = "plain",
        choice_template: str = "toy_choice",
        choices: tuple[str, str] = ("A", "B"),
        max_tokens: int = 128,
        orders: Orders = "both",
        dtype: str = "auto",
        batch_size: int = 256,
        device: str = "auto",
        letters: str | None = None,
        trim: str | None = "auto",
    ) -> None:
        self.template = Template.named(choice_template, asks="choice").trimming(trim)
        check_choice(self.template)
        refuse_below(1, max_tokens=max_tokens, batch_size=batch_size)
        choose_device(device)  # refuses one that is not there
        self.model, self.choices, self.orders = model, choices, orders
        self.sees_order = orders == "one"
        self.max_tokens, self.batch_size, self.device = max_tokens, batch_size, device
        self.too_long = self.trimmed = 0
        self._selector = SelectorModule(
            model, base=base, choices=choices, adapter=adapter, dtype=dtype, letters=letters
        )
        refuse_one_order(self._selector.asked, orders)
        self._tokenizer: Any = None
        check_odd(len(self._selector.adapter_names))  # reads the folder now, not at the first pair

    def verdicts(self, fields: Sequence[Fields], ours: Sequence[str], theirs: Sequence[str]) -> list[float]:
        check_slots(self.template.slots, fields, "SelectorJudge")
        pairs = [
            Comparison(dict(slots), a.strip(), b.strip())
            for slots, a, b in zip(fields, ours, theirs, strict=True)
        ]
        different = [index for index, pair in enumerate(pairs) if pair.first != pair.second]
        scores = np.full(len(pairs), 0.5)  # equal answers are not shown
        if different:
            log_probs = self.log_probs([pairs[index] for index in different])
            winners = majority(log_probs)
            verdicts = np.where(winners == 0, 1.0, np.where(winners == 1, 0.0, 0.5))
            too_long = np.isnan(log_probs).any(axis=(0, 2))  # [pairs], of [selectors, pairs, 2]
            self.too_long = self._count(
                self.too_long, int(too_long.sum()), f"of {len(different)} pairs", "are not read"
            )
            scores[different] = np.where(too_long, np.nan, verdicts)  # NaN: not read
        return [float(verdict) for verdict in scores]

    def log_probs(self, pairs: Sequence[Comparison]) -> np.ndarray:
        """Return each selector's log-probabilities that the first, and that the second answer of a pair is better.

        Returns:
            ``(selectors, pairs, 2)``, the mean over both orders with ``orders="both"``; NaN for a pair that is too long.

        Raises:
            ValueError: a selector gives no numbers for a pair that fits.
        """
        selector = self._loaded()
        encoded = encode_choice(self._tokenizer, self.template, pairs, self.max_tokens, self.choices)
        cut = f"lose the end of {{{self.template.trim}}}"
        self.trimmed = self._count(self.trimmed, encoded.trimmed, f"of {2 * len(pairs)} inputs", cut)
        fits = np.flatnonzero(encoded.both_kept())
        votes = gather(self._votes(selector, ShownPairs(encoded, fits, self.orders)), len(pairs), self.orders)
        if np.isnan(votes[:, fits]).any():
            raise ValueError("the selector gives no numbers for a pair: train it anew at a lower rate")
        return votes

    def _votes(self, selector: SelectorModule, shown: ShownPairs) -> Iterator[dict[str, Any]]:
        for start in range(0, len(shown), self.batch_size):
            sequences = [shown[i] for i in range(start, min(start + self.batch_size, len(shown)))]
            batch = collate_choices(
                [choice for choice, _, _ in sequences], pad_id(self._tokenizer), with_types=False
            )
            batch = {name: part.to(selector.causal_lm.device) for name, part in batch.items()}
            with torch.no_grad():
                votes = selector.predict_step(batch, 0)
            for (_, index, order), log_probs in zip(sequences, votes.tolist(), strict=True):
                yield {"index": index, "order": order, "logp_a": log_probs[0], "logp_b": log_probs[1]}

    def _loaded(self) -> SelectorModule:
        if self._selector.network is None:
            self._tokenizer = load_tokenizer(self.model)
            self.template = self.template.for_tokenizer(self._tokenizer)
            make_ready(self._selector, self.device)
        return self._selector

    def _count(self, before: int, number: int, what: str, so: str) -> int:
        if number and not before:
            rank_zero_info(
                f"SelectorJudge: {number} {what} are longer than max_tokens={self.max_tokens} and {so}"
            )
        return before + number
