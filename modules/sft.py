"""Supervised fine-tuning: the mean token loss of each response, without the prompt."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import Tensor

from fedlight.devices.shape import BatchShape
from fedlight.modules.functional import sft_loss
from fedlight.modules.language import scoring, skeleton
from fedlight.modules.language.module import Batch, LanguageModule
from fedlight.modules.language.readout import response_log_probs


class SFTModule(LanguageModule):
    """Module that learns to write the responses of its training data.

    A batch has ``input_ids``, ``attention_mask`` and ``labels``, each ``(batch, tokens)`` and padded on the right;
    labels are -100 on prompt and padding. The output head is computed at labelled positions only. A batch may have
    ``weights``, ``(batch,)`` float, for pseudo-labelled data; losses are still averaged over the number of examples.
    Arguments are those of `LanguageModule`.

    Attributes:
        base_bits: bits per weight of the base under an emulated device that quantizes it; None for the base as loaded.
    """

    base_bits: int | None = None
    batch_form: ClassVar[Mapping[str, int]] = {"input_ids": 2, "labels": 2}
    data_hint = "answers: data=InstructionDataModule, or PreferenceDataModule with view=sft"

    def example_losses(self, batch: Batch) -> Tensor:
        """Return the mean negative log-probability of each response's tokens times the example's weight, ``(batch,)``."""
        self._check_batch(batch)
        losses = sft_loss(*response_log_probs(self.causal_lm, batch))
        return losses * batch["weights"] if "weights" in batch else losses

    def check_one_adapter(self) -> None:
        """Raise ValueError where ``adapter`` is a folder of several, of which the first alone would write."""
        if len(self.adapter_names) > 1:
            raise ValueError(
                f"adapter={self.options.adapter!r} has several adapters: give one of its folders, such as adapter0 in it"
            )

    def free_energies(
        self, prompts: Sequence[str], answers: Sequence[str], temperature: float = 1.0
    ) -> list[float]:
        """Return the mean free energy of each answer; see `fedlight.modules.language.scoring.free_energies`."""
        self.configure_model()
        return scoring.free_energies(self.causal_lm, self.tokenizer, prompts, answers, temperature)

    def response_batch(self, prompts: Sequence[str], responses: Sequence[str]) -> Batch:
        """Return a batch of responses after their prompts; see `fedlight.modules.language.scoring.response_batch`."""
        self.configure_model()
        pairs = list(zip(prompts, responses, strict=True))
        return scoring.response_batch(self.tokenizer, pairs, self.causal_lm.device)

    def sketch_batch(self, shape: BatchShape) -> Batch:
        """Return a batch of that shape; see `fedlight.devices.cost.Sketched`."""
        return skeleton.make_responses(shape)
