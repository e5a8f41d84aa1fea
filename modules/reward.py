"""Scalar reward model: one number for a prompt with a response, higher where the response is better.

L. Ouyang et al., "Training language models to follow instructions with human feedback", NeurIPS 2022,
https://arxiv.org/abs/2203.02155, eq. 1: ``loss = -log sigmoid(r(x, yw) - r(x, yl))``, the preference model of R. Bradley
and M. Terry, "Rank Analysis of Incomplete Block Designs", Biometrika 1952. With F. Wu et al. (FedBis, ICLR 2025,
https://arxiv.org/abs/2407.03038, section 1) it is the baseline of a binary selector: a pair takes two sequences and two
computation graphs, a selector one of each. Deviation: K = 2, each pair is one example.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from fedlight.devices.shape import BatchShape
from fedlight.modules.functional import bradley_terry_loss, joint_key, text_keys
from fedlight.modules.language import skeleton
from fedlight.modules.language.module import Batch
from fedlight.modules.language.readout import HiddenStates, hidden_states
from fedlight.modules.pairs import PairModule, join


class RewardModule(PairModule):
    """Module that learns to give the chosen response a higher reward than the rejected one.

    A batch has ``chosen`` and ``rejected`` as `DPOModule` takes them; labels are not read. The
    head is a new linear layer with one output on the hidden state of a language model's last token, the end of the
    response, or an encoder's own classification head. It is trained without LoRA and saved with the adapter, whose folder
    ``AutoModelForSequenceClassification`` with ``num_labels=1`` and ``PeftModel`` read. Arguments are those of
    `LanguageModule`.
    """

    task = "SEQ_CLS"
    num_labels = 1

    def sketch_batch(self, shape: BatchShape) -> Batch:
        return {side: skeleton.make_texts(shape) for side in ("chosen", "rejected")}

    def rewards(self, batch: dict[str, Tensor], compute: HiddenStates = hidden_states) -> Tensor:
        """Return the reward of each text, ``(batch,)``.

        Args:
            batch: ``input_ids`` and ``attention_mask``, ``(batch, tokens)``, padded on the right.
            compute: function that returns the hidden states of a language model.
        """
        network, mask = self.causal_lm, batch["attention_mask"]
        head = getattr(network, "score", None)
        if head is None:  # an encoder
            scores = network(input_ids=batch["input_ids"], attention_mask=mask).logits
        else:
            # Where padding and end are one token, transformers would read the last token before the end.
            states, last = compute(network, batch["input_ids"], mask), mask.sum(dim=1) - 1
            scores = head(states[torch.arange(len(last), device=last.device), last])
        return scores.float().squeeze(dim=1)

    def pair_rewards(self, batch: Batch) -> Tensor:
        """Return the rewards of the chosen and the rejected response, ``(batch, 2)``, in one forward pass."""
        joined = join(batch["chosen"], batch["rejected"])
        return torch.stack(self.rewards(joined, self.shared_prefix.pairs).chunk(2), dim=1)

    def example_metrics(self, batch: Batch) -> dict[str, Tensor]:
        """Return Bradley-Terry loss and accuracy (1 where the chosen reward is higher, 1/2 in a tie), ``(batch,)`` each."""
        chosen, rejected = self.pair_rewards(batch).unbind(dim=1)
        won, tied = chosen > rejected, chosen == rejected
        return {"loss": bradley_terry_loss(chosen, rejected), "accuracy": won.float() + 0.5 * tied.float()}

    def batch_key(self, batch: Batch) -> int:
        sides = (batch["chosen"], batch["rejected"])
        return joint_key(
            *(key for side in sides for key in text_keys(side["input_ids"], side["attention_mask"]))
        )

    def predict_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Return the log-probabilities that ``chosen`` and that ``rejected`` is better, ``(batch, 2)``."""
        chosen, rejected = self.pair_rewards(batch).unbind(dim=1)
        margin = chosen - rejected
        return logsigmoid(torch.stack([margin, -margin], dim=1))  # log P of either side

    # It has no likelihoods of words; None hides them from isinstance, by which callbacks refuse a module.
    log_likelihoods = None  # type: ignore[assignment]

    def generate(self, *args: Any, **kwargs: Any) -> list[list[str]]:
        """Raise ValueError: a reward model writes no text."""
        raise ValueError("a RewardModule does not write text: use an SFTModule")
