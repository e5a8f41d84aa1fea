"""The binary selector of FedBis: which of two responses is the better one.

E. Wu et al., "Towards Federated RLHF with Aggregated Client Preference for LLMs", ICLR 2025, https://arxiv.org/abs/2407.03038:
cross-entropy (eq. 3) over the logits of two choice tokens behind a prompt that shows both responses. A classification
head with two labels on a pretrained encoder is this library's addition, for encoders that are no language models.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from fedlight.modules import base_model, readout
from fedlight.modules.functional import choice_loss
from fedlight.modules.language_model import Batch, LanguageModule
from fedlight.modules.settings import check_choice

STAGES = ("val", "test")
TEXTS = ("input_ids", "attention_mask", "token_type_ids")


class SelectorModule(LanguageModule):
    """Says A or B.

    A batch has ``input_ids`` and ``attention_mask``, ``(batch, tokens)`` and padded on the right, and ``labels``,
    ``(batch,)``, 0 where A is better and 1 where B is; for an encoder also ``token_type_ids`` where it has them. Under
    ``head="choice"`` the text ends right before the choice token.

    Args:
        model: see :class:`LanguageModule`.
        head: ``choice``, two rows of a causal language model's output head at the last position, or ``classifier``, a
            2-class head on an encoder, trained whole and saved with the adapter.
        choices: the words for A and B under ``head="choice"``; each has to be one token behind ``": "``.
        kwargs: further arguments of :class:`LanguageModule`.

    Raises:
        ValueError: a setting is misspelt or out of range.
    """

    def __init__(
        self, model: str, head: str = "choice", choices: Sequence[str] = ("A", "B"), **kwargs: Any
    ) -> None:
        super().__init__(model, **kwargs)
        check_choice("head", head, ("choice", "classifier"))
        if len(choices) != 2:
            raise ValueError(f"choices={list(choices)} must be two words")
        self.task = "CAUSAL_LM" if head == "choice" else "SEQ_CLS"
        self.accuracy = nn.ModuleDict({stage: MulticlassAccuracy(2, average="micro") for stage in STAGES})
        self.choice_rows: Tensor | None = None

    def configure_model(self) -> None:
        if self.network is not None:
            return
        super().configure_model()
        # A decoder with a classification head finds its last token by the padding token.
        self.causal_lm.config.pad_token_id = self.tokenizer.pad_token_id
        if self.options.head == "choice":
            self.choice_rows = torch.tensor(choice_tokens(self.tokenizer, self.options.choices), device="cpu")
            if any(weight.requires_grad for weight in self.causal_lm.get_output_embeddings().parameters()):
                raise ValueError(
                    "lora_targets names the output head, of which head='choice' reads two frozen rows"
                )

    def load_base(self) -> tuple[Any, list[str]]:
        if self.options.head == "choice":
            return super().load_base()
        return base_model.load_base(self.options.model, num_labels=2, **self.load_options())

    def choice_logits(self, batch: Batch) -> Tensor:
        """Logits of A and B, ``(batch, 2)``."""
        if self.choice_rows is None:
            logits: Tensor = self.network(**{name: batch[name] for name in TEXTS if name in batch}).logits
            return logits.float()
        rows = self.choice_rows.to(batch["input_ids"].device)
        return readout.choice_logits(self.causal_lm, batch["input_ids"], batch["attention_mask"], rows)

    def example_losses(self, batch: Batch) -> Tensor:
        """Cross-entropy over the two choices, ``(batch,)``."""
        return choice_loss(self.choice_logits(batch), batch["labels"])

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate("val", batch)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate("test", batch)

    def _evaluate(self, stage: str, batch: Batch) -> None:
        logits, accuracy = self.choice_logits(batch), cast(MulticlassAccuracy, self.accuracy[stage])
        self.log_means(stage, {"loss": choice_loss(logits, batch["labels"])})
        accuracy.update(logits, batch["labels"])
        self.log(f"{stage}/accuracy", accuracy, prog_bar=True)

    def predict_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Log-probabilities of A and B, ``(batch, 2)``."""
        return self.choice_logits(batch).log_softmax(dim=1)

    def generate(self, *args: Any, **kwargs: Any) -> list[list[str]]:
        """Completions; a classifier has none.

        Raises:
            ValueError: ``head`` is ``classifier``.
        """
        if self.options.head == "classifier":
            raise ValueError("head='classifier' does not write text: use head='choice' or an SFTModule")
        return super().generate(*args, **kwargs)


def choice_tokens(tokenizer: Any, choices: Sequence[str]) -> list[int]:
    """The one token of each choice behind ``": "``.

    Raises:
        ValueError: the choices are not one distinct token each.
    """
    rows = [tokenizer(f": {choice}", add_special_tokens=False)["input_ids"] for choice in choices]
    words = [tokenizer.decode(row[-1:]).strip() for row in rows]
    if words != list(choices) or rows[0][:-1] != rows[1][:-1] or rows[0] == rows[1]:
        raise ValueError(
            f"choices={list(choices)}: behind ': ' this tokenizer does not make one distinct token of each, but "
            f"{' and '.join(str(tokenizer.convert_ids_to_tokens(row)) for row in rows)}; take other words or models"
        )
    return [row[-1] for row in rows]
