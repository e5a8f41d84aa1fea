"""Language model on this machine as a text generator: no prompt leaves it."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from itertools import compress
from pathlib import Path

from fedlight.datamodules.text.templates import Template
from fedlight.datamodules.vectors.encoders import content_digest
from fedlight.devices import hardware
from fedlight.evaluation.tasks.sampling import Sampling
from fedlight.generators.endpoint import TextGenerator
from fedlight.modules.language.adapter_folders import adapter_checksum
from fedlight.modules.language.base_model import Execution
from fedlight.modules.language.generation import encode_prompts
from fedlight.modules.language.module import LanguageModule
from fedlight.modules.sft import SFTModule
from fedlight.processes.work import for_each
from fedlight.support.checks import refuse_below
from fedlight.support.needs import ReadsModel
from fedlight.support.seeding import derive_seed

STOP = ("\nInstruction 4", "\nExample 2", "\n### Instruction")

CUT_SHARE = 0.98
"""Share of ``max_new_tokens`` from which an answer counts as cut off: its text may have fewer tokens than were drawn."""


class LocalGenerator(ReadsModel, TextGenerator):
    """Text generator that asks a model of this machine, with or without an adapter; the first prompt loads it.

    A prompt that does not fit into the model has an empty answer. `usage` counts answers, those cut off at
    ``max_new_tokens``, and prompts that were too long.

    Args:
        model: hub name, folder, or ``"toy"``.
        adapter: folder of an adapter on it, if any.
        base: ``plain``, ``int8`` or ``nf4``: the number form of its weights.
        template: name or text with one slot, such as ``alpaca_no_input``; ``chat``: the tokenizer's own chat template; None:
            the bare prompt, for a base model without instruction tuning.
        sampling: temperature and length of the answers.
        stop: an answer ends before any of these texts, or of the template's. None: `STOP`, for Self-Instruct's prompts.
        keep_cut: also return answers that were cut off at ``max_new_tokens``; else they count as none.
        batch_size: prompts at once.
        dtype: ``auto``, ``fp32``, ``bf16`` or ``fp16``.
        device: ``auto`` is the GPU where there is one.
        seed: of the draws; they depend on it, the batch and the number of the draw.
        trust_remote_code: run code that comes with the model.

    Raises:
        ValueError: a setting is misspelt or out of range; at an answer, the tokenizer has no ``chat`` template.
        OSError: at an answer, there is no such model.
    """

    without_effect = ("device",)
    shares_work = True

    def __init__(
        self,
        model: str,
        adapter: str | None = None,
        base: str = "plain",
        template: str | None = None,
        sampling: Sampling = Sampling(),
        stop: list[str] | None = None,
        keep_cut: bool = False,
        batch_size: int = 16,
        dtype: str = "auto",
        device: str = "auto",
        seed: int = 0,
        trust_remote_code: bool = False,
    ) -> None:
        refuse_below(1, batch_size=batch_size)
        hardware.choose_device(device)  # refuses one that is not there, now and not at the first prompt
        self.model, self.adapter, self.base, self.dtype = model, adapter, base, dtype
        self.template, self.sampling, self.keep_cut = template, sampling, keep_cut
        self.stop = list(STOP) if stop is None else stop
        if not all(self.stop):
            raise ValueError(f"stop={self.stop}: an empty text would end every answer at once")
        self.batch_size, self.device, self.seed = batch_size, device, seed
        self.trust_remote_code = trust_remote_code
        self._template = (
            Template("{prompt}", "prompt") if template is None else Template.named(template, asks="prompt")
        )
        if len(set(self._template.slots)) != 1:
            slots = ", ".join(self._template.slots)
            raise ValueError(f"template={template!r} has the slots {slots}, but a prompt fills one")
        self.stop = [*self.stop, *self._template.stops]
        self._counts = Counter(answers=0, cut=0, too_long=0)
        self._module = self._new()
        self._module.check_one_adapter()  # looks into the folder now, not at the first prompt

    def complete(self, prompts: Sequence[str], draw: int = 0) -> list[str]:
        module = self._loaded()
        slot = self._template.slots[0]
        texts = [self._template.render({slot: prompt}).text for prompt in prompts]
        lengths = [len(row) for row in encode_prompts(module.tokenizer, texts)]
        fits = [*compress(range(len(texts)), module.fits(texts, self.sampling.max_new_tokens))]
        fits.sort(key=lambda index: lengths[index])  # a batch is as wide as its longest
        batches = [fits[start : start + self.batch_size] for start in range(0, len(fits), self.batch_size)]
        generated = for_each(lambda rows: self._answer([texts[row] for row in rows], draw), batches)
        answers = [""] * len(texts)
        for rows, (written, cut) in zip(batches, generated, strict=True):
            for row, answer in zip(rows, written, strict=True):
                answers[row] = answer
            self._counts["cut"] += cut
        self._counts.update(answers=len(fits), too_long=len(texts) - len(fits))
        return answers

    def settings(self) -> dict[str, object]:
        """Return the arguments that answers depend on; of folders, digests of their content."""
        return {**super().settings(), **self._contents}

    def usage(self) -> dict[str, int]:
        return dict(self._counts)

    def release(self) -> None:
        self._module = self._new()

    @cached_property
    def _contents(self) -> dict[str, object]:
        folder = Path(self.model).expanduser()
        model = {"model": content_digest(folder)} if folder.is_dir() else {}
        return {**model, **({"adapter": adapter_checksum(self.adapter)} if self.adapter else {})}

    def _new(self) -> SFTModule:
        return SFTModule(
            self.model,
            base=self.base,
            dtype=self.dtype,
            adapter=self.adapter,
            execution=Execution(trust_remote_code=self.trust_remote_code),
        )

    def _loaded(self) -> SFTModule:
        if self._module.network is None:
            make_ready(self._module, self.device)
            self._template = self._template.for_tokenizer(self._module.tokenizer)
        return self._module

    def _answer(self, texts: list[str], draw: int) -> tuple[list[str], int]:
        generated = self._module.generate(
            texts,
            **dataclasses.asdict(self.sampling),
            seed=derive_seed(self.seed, "local generator", draw, *texts),
            stop=self.stop,
        )
        answers = [text for (text,) in generated]
        lengths = [len(row) for row in encode_prompts(self._module.tokenizer, answers)]
        cut = [length >= CUT_SHARE * self.sampling.max_new_tokens for length in lengths]
        kept = [
            answer if self.keep_cut or not is_cut else "" for answer, is_cut in zip(answers, cut, strict=True)
        ]
        return kept, sum(cut)


def make_ready(module: LanguageModule, device: str) -> None:
    """Load a module's model for inference; device ``auto`` is the GPU where there is one."""
    with hardware.choose_device(device):  # decides the number type, too
        module.configure_model()
    module.eval()
