"""Answers before and after training: a few validation prompts, answered by the raw and by the tuned model."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import numpy as np
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng

from fedlight.evaluation.tasks.model import KnowsWhatFits
from fedlight.pretrained.openings import openings
from fedlight.processes.work import is_first
from fedlight.support.checks import Checked, refuse_below
from fedlight.support.files import refuse_unwritable, write_json_lines

MOST_TOKENS = 128


class Sample(NamedTuple):
    """Prompt with its reference, as texts."""

    prompt: str
    reference: str
    tokens: int  # of the reference


class SampleAnswers(Checked, L.Callback):
    """Lightning callback that writes ``samples.jsonl`` after ``fit``, for the report.

    Each line has ``prompt``, ``reference``, ``raw`` (the answer without the adapter) and ``tuned``. Prompts are validation
    examples at equal distances. Answers are greedy and at most as long as the longest reference, or 128 tokens. Training
    continues as if no answer had been written. Validation rows belong to clients: the report shows them on demand.

    Args:
        number: prompts, at least 1.

    Raises:
        ValueError: ``number`` is out of range; before training, the module writes no text or the data have no responses.
        OSError: the disk is full.
    """

    def __init__(self, number: int = 5) -> None:
        refuse_below(1, "SampleAnswers.", number=number)
        self.number = number
        self._samples: list[Sample] = []

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Choose the prompts, so that a module or data that do not fit are refused before training."""
        data = trainer.datamodule  # type: ignore[attr-defined]
        has_responses = all(hasattr(data, name) for name in ("val_set", "tokenizer", "collate"))
        if not hasattr(pl_module, "generate") or not has_responses:
            raise ValueError(
                f"SampleAnswers needs a module that writes text and data with responses, such as SFTModule and "
                f"InstructionDataModule, not {type(pl_module).__name__} and {type(data).__name__}: take it out"
            )
        self._samples = choose(data, self.number) if data.val_set is not None and len(data.val_set) else []
        if not self._samples:
            rank_zero_info(
                "SampleAnswers: no validation rows, so no answers are written: set split.val_share above 0"
            )
        elif is_first():
            refuse_unwritable(Path(trainer.default_root_dir), "trainer.default_root_dir")

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self._samples:
            return
        tokens = min(MOST_TOKENS, max(sample.tokens for sample in self._samples))
        prompts = [sample.prompt for sample in self._samples]
        fits = (
            pl_module.fits(prompts, tokens) if isinstance(pl_module, KnowsWhatFits) else [True] * len(prompts)
        )
        shown = [sample for sample, is_short in zip(self._samples, fits, strict=True) if is_short]
        with isolate_rng():  # training continues as if no answer had been written
            data = trainer.datamodule  # type: ignore[attr-defined]
            stop = data.template.stops if hasattr(data, "template") else ()
            settings = {"temperature": 0.0, "max_new_tokens": tokens, "seed": 0, "stop": stop}
            raw, tuned = (
                _answers(pl_module, [sample.prompt for sample in shown], {**settings, "raw": off})
                for off in (True, False)
            )
        lines = [
            {"prompt": sample.prompt, "reference": sample.reference, "raw": before, "tuned": after}
            for sample, before, after in zip(shown, raw, tuned, strict=True)
        ]
        if (
            trainer.is_global_zero
        ):  # the strategy has ended its team by now, and every process is its own first one
            write_json_lines(Path(trainer.default_root_dir) / "samples.jsonl", lines)


def choose(data: Any, number: int) -> list[Sample]:
    """Return validation examples at equal distances as texts, each prompt once.

    Raises:
        ValueError: the examples have no responses.
    """
    # Of fewer rows than prompts some places would come twice. Labels are -100 on prompt and padding.
    places = np.unique(np.linspace(0, len(data.val_set) - 1, number).round().astype(int))
    batch = data.collate([data.val_set[int(place)] for place in places])
    needed = {"input_ids", "labels", "attention_mask"} <= set(batch)
    # A selector's batches have one label for each pair.
    if not needed or batch["labels"].shape != batch["input_ids"].shape:
        raise ValueError(
            "SampleAnswers reads the responses of sft batches, and these data have none: take it out"
        )
    samples: dict[str, Sample] = {}
    for ids, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
        taught = [place for place, label in enumerate(labels) if label != -100]
        # Of a conversation the last answer, which begins after the last token without loss.
        start = next(place for place in reversed(taught) if place == 0 or labels[place - 1] == -100)
        prompt, response = ids[:start], ids[start : taught[-1] + 1]
        text = data.tokenizer.decode(prompt)
        [opening] = openings(data.tokenizer, [text])
        if prompt[: len(opening)] == opening:
            text = data.tokenizer.decode(prompt[len(opening) :])  # encoding puts them before it again
        reference = data.tokenizer.decode(response, skip_special_tokens=True).strip()
        samples.setdefault(text, Sample(text, reference, len(response)))
    return [*samples.values()]


def _answers(module: Any, prompts: Sequence[str], settings: Mapping[str, Any]) -> list[str]:
    return [texts[0] for texts in module.generate(prompts, **settings)] if prompts else []
