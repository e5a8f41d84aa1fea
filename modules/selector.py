"""The binary selector of FedBis: which of two responses is the better one.

E. Wu et al., "Towards Federated RLHF with Aggregated Client Preference for LLMs", ICLR 2025, https://arxiv.org/abs/2407.03038:
cross-entropy (eq. 3) over the logits of two choice tokens behind a prompt that shows both responses. A classification
head with two labels on a pretrained encoder is this library's addition, for encoders that are no language models.

FedBiscuit, of the same paper, has U selectors: U adapters on one base, each of which votes; the majority decides.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from fedlight.devices.shape import BatchShape
from fedlight.modules.functional import choice_loss
from fedlight.modules.language import adapters, readout, skeleton
from fedlight.modules.language.language_model import Batch, LanguageModule
from fedlight.support.checks import check_choice

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
        kwargs: further arguments of :class:`LanguageModule`; ``num_adapters`` selectors have to be an odd number.

    Raises:
        ValueError: a setting is misspelt or out of range, or the votes of the adapters could tie.
    """

    batch_form: ClassVar[Mapping[str, int]] = {"input_ids": 2, "labels": 1}
    reads = "votes: data=PreferenceDataModule with view=selector"

    def __init__(
        self, model: str, head: str = "choice", choices: Sequence[str] = ("A", "B"), **kwargs: Any
    ) -> None:
        super().__init__(model, **kwargs)
        check_choice("head", head, ("choice", "classifier"))
        if len(choices) != 2:
            raise ValueError(f"choices={list(choices)} must be two words")
        check_odd(self.options.num_adapters)
        self.task, self.num_labels = ("CAUSAL_LM", None) if head == "choice" else ("SEQ_CLS", 2)
        self.accuracy = nn.ModuleDict({stage: MulticlassAccuracy(2, average="micro") for stage in STAGES})
        self.choice_rows: Tensor | None = None

    def configure_model(self) -> None:
        if self.network is not None:
            return
        check_odd(len(self.adapter_names))  # a folder of adapters says their number
        super().configure_model()
        # A decoder with a classification head finds its last token by the padding token.
        self.causal_lm.config.pad_token_id = self.tokenizer.pad_token_id
        if self.options.head == "choice":
            self.choice_rows = torch.tensor(choice_tokens(self.tokenizer, self.options.choices), device="cpu")
            if any(weight.requires_grad for weight in self.causal_lm.get_output_embeddings().parameters()):
                raise ValueError(
                    "lora_targets names the output head, of which head='choice' reads two frozen rows"
                )

    def skeleton(self, dtype: str = "bf16") -> LanguageModule:
        made = cast(SelectorModule, super().skeleton(dtype))
        if self.num_labels is None:
            made.choice_rows = torch.tensor([0, 1])  # which rows they are costs nothing
        return made

    def sketch_batch(self, shape: BatchShape) -> Batch:
        return skeleton.texts(shape) | {"labels": torch.zeros(shape.examples, dtype=torch.int64)}

    def choice_logits(self, batch: Batch) -> Tensor:
        """Logits of A and B by the active adapter, ``(batch, 2)``."""
        if self.choice_rows is None:
            logits: Tensor = self.network(**{name: batch[name] for name in TEXTS if name in batch}).logits
            return logits.float()
        rows = self.choice_rows.to(batch["input_ids"].device)
        return readout.choice_logits(self.causal_lm, batch["input_ids"], batch["attention_mask"], rows)

    def ensemble_logits(self, batch: Batch) -> Tensor:
        """Logits of A and B by each of the U adapters, ``(batch, U, 2)``; the active one stays active."""
        if len(self.adapter_names) == 1:
            return self.choice_logits(batch)[:, None]
        logits = []
        with adapters.switching(self.network) as switch:
            for name in self.adapter_names:
                switch(name)
                logits.append(self.choice_logits(batch))
        return torch.stack(logits, dim=1)

    def example_losses(self, batch: Batch) -> Tensor:
        """Cross-entropy over the two choices, by the active adapter, ``(batch,)``."""
        return choice_loss(self.choice_logits(batch), batch["labels"])

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Which examples are decided rightly.

        Returns:
            ``correct``, ``(batch, U)`` bool, by each adapter; ``vote``, ``(batch,)`` bool, by the majority of them.
        """
        return self._evaluate("val", batch)

    def test_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """As :meth:`validation_step`."""
        return self._evaluate("test", batch)

    def _evaluate(self, stage: str, batch: Batch) -> dict[str, Tensor]:
        logits, labels = self.ensemble_logits(batch), batch["labels"]
        losses = [choice_loss(part, labels) for part in logits.unbind(dim=1)]
        choices = logits.argmax(dim=2)
        winners, correct = majority(choices), choices == labels[:, None]
        metrics = {"loss": torch.stack(losses, dim=1).mean(dim=1)}
        if len(losses) > 1:
            shares = correct.float().unbind(dim=1)
            metrics |= {
                f"accuracy_{name}": part for name, part in zip(self.adapter_names, shares, strict=True)
            }
        self.log_means(stage, metrics)
        accuracy = cast(MulticlassAccuracy, self.accuracy[stage])
        accuracy.update(winners, labels)
        self.log(f"{stage}/accuracy", accuracy, prog_bar=True)
        return {"correct": correct, "vote": winners == labels}

    def predict_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Log-probabilities of A and B, ``(batch, 2)``; of several adapters ``(batch, 2, U)``."""
        log_probs = self.ensemble_logits(batch).log_softmax(dim=2).transpose(1, 2)
        return log_probs.squeeze(dim=2) if len(self.adapter_names) == 1 else log_probs

    def generate(self, *args: Any, **kwargs: Any) -> list[list[str]]:
        """Completions; a classifier has none.

        Raises:
            ValueError: ``head`` is ``classifier``.
        """
        if self.options.head == "classifier":
            raise ValueError("head='classifier' does not write text: use head='choice' or an SFTModule")
        return super().generate(*args, **kwargs)


def check_odd(num_adapters: int) -> None:
    """Refuses an even number of votes: they can tie.

    Raises:
        ValueError: see above.

    Example:
        >>> check_odd(2)
        Traceback (most recent call last):
        ...
        ValueError: num_adapters=2: an even number of selectors can tie; take an odd number, for example 3
    """
    if num_adapters % 2 == 0:
        raise ValueError(
            f"num_adapters={num_adapters}: an even number of selectors can tie; take an odd number, for example "
            f"{num_adapters + 1}"
        )


def majority(choices: Tensor) -> Tensor:
    """What most selectors choose.

    Args:
        choices: ``(batch, U)``, 0 for A and 1 for B, U odd.

    Returns:
        ``(batch,)``, 0 or 1.

    Example:
        >>> majority(torch.tensor([[0, 1, 1], [0, 0, 1]])).tolist()
        [1, 0]
    """
    return (2 * choices.sum(dim=1) > choices.shape[1]).long()


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
