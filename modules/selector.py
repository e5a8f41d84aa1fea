"""Binary selector of FedBis, which decides which of two responses is better.

F. Wu et al., "Towards Federated RLHF with Aggregated Client Preference for LLMs", ICLR 2025, https://arxiv.org/abs/2407.03038:
cross-entropy (eq. 3) over the logits of two choice tokens after a prompt that shows both responses. A classification
head with two labels on a pretrained encoder is this library's addition, for encoders that are no language models.

FedBiscuit, of the same paper, has U selectors: U adapters on one base, which decide by majority vote.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn

from fedlight.devices.shape import BatchShape
from fedlight.modules.both_orders import APART, BothOrders, average_orders, log_both_orders
from fedlight.modules.choices import STAGES, log_choices, stage_accuracies
from fedlight.modules.functional import choice_loss
from fedlight.modules.language import adapters, base_model, readout, skeleton
from fedlight.modules.language.module import Batch, LanguageModule
from fedlight.support.checks import check_range
from fedlight.support.files import read_json, read_text, write_json

TEXTS = ("input_ids", "attention_mask", "token_type_ids")
ASKED = "selector.json"
"""File in an adapter's folder that says how its selectors were trained: head, choices, orders, prior and temperature."""


class SelectorModule(LanguageModule):
    """Module that learns to choose between responses A and B.

    A batch has ``input_ids`` and ``attention_mask``, ``(batch, tokens)`` and padded on the right, and ``labels``,
    ``(batch,)``, 0 where A is better and 1 where B is; for an encoder also ``token_type_ids`` where it has them. With
    ``head="choice"`` the text ends right before the choice token. Where a batch has ``orders``, ``(batch,)``, 2c and 2c + 1
    for the two orders of comparison c, validation and testing log ``accuracy_both_orders`` too, with the two orders averaged
    (see `fedlight.modules.both_orders`), and the ends of its interval, ``_low`` and ``_high``.

    Args:
        model: see `LanguageModule`.
        head: ``choice``, two rows of a causal language model's output head at the last position, or ``classifier``, a
            2-class head on an encoder, trained without LoRA and saved with the adapter.
        choices: words for A and B with ``head="choice"``; each has to be one token after ``": "``.
        orders: ``one``: the loss of each order of a vote, as in the paper; or ``both``: the loss of the mean logits of the
            two orders. In the mean a preference for a position cancels. Both orders are then neighbours in a batch
            (``twins_together=true`` in `PreferenceDataModule`). Labels and judges average by their own ``orders``.
        letters: JSON file with ``prior`` and ``temperature`` of the choices, written by
            `fedlight.recipes.steps.calibrate_letters`: the prior is subtracted from the logit of B, and both logits are
            divided by the temperature. None: those of the training of ``adapter``, if it had any, else the model's logits.
        kwargs: further arguments of `LanguageModule`; ``num_adapters`` is the number of selectors. An even number of them
            can tie, so it is evaluated without a vote.

    Attributes:
        examples_together: neighbours in a batch whose losses are computed together, on devices and in processes as well.

    Raises:
        ValueError: a setting is misspelt or out of range, or ``adapter`` was trained with another head or other choices.
    """

    batch_form: ClassVar[Mapping[str, int]] = {"input_ids": 2, "labels": 1}
    data_hint = "votes: data=PreferenceDataModule with view=selector"

    def __init__(
        self,
        model: str,
        head: Literal["choice", "classifier"] = "choice",
        choices: Sequence[str] = ("A", "B"),
        orders: Literal["one", "both"] = "one",
        letters: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, **kwargs)
        if len(choices) != 2:
            raise ValueError(f"choices={list(choices)} must be two words")
        self.task, self.num_labels = ("CAUSAL_LM", None) if head == "choice" else ("SEQ_CLS", 2)
        self.accuracy = stage_accuracies()
        self.both_orders = nn.ModuleDict({stage: BothOrders() for stage in STAGES})
        self.choice_rows: Tensor | None = None
        self.examples_together = 2 if orders == "both" else 1
        options = self.options
        trained = {} if options.adapter is None or options.merge_adapter else read_asked(options.adapter)
        settings = {"head": head, "choices": list(choices)}
        refuse_other_training(trained, settings)
        self.asked = {**settings, "orders": trained.get("orders", orders), "prior": 0.0, "temperature": 1.0}
        self.asked |= {name: trained[name] for name in ("prior", "temperature") if name in trained}
        if letters is not None:
            self.asked["prior"], self.asked["temperature"] = read_letters(letters)

    def setup(self, stage: str) -> None:
        super().setup(stage)
        data = getattr(self.trainer, "datamodule", None)
        if stage == "fit":
            self.asked["orders"] = self.options.orders  # from now on it is trained so
        elif (shown := getattr(data, "orders", None)) is not None:
            refuse_one_order(self.asked, shown)
        if stage == "fit" and self.options.orders == "both":  # before the base is loaded
            size, val = getattr(data, "eval_batch_size", 2), getattr(data, "val_set", None)
            is_cut = size % 2 and self.trainer.limit_val_batches and val is not None and len(val) > size
            if is_cut or getattr(data, "examples_together", 2) % 2:
                raise ValueError(APART)

    def configure_model(self) -> None:
        if self.network is not None:
            return
        if self.options.head == "choice":  # before the base is loaded, which takes longer than a tokenizer
            trusted = self.options.execution["trust_remote_code"]
            tokenizer = base_model.load_tokenizer(self.options.model, trusted)
            self.choice_rows = torch.tensor(choice_tokens(tokenizer, self.options.choices), device="cpu")
        super().configure_model()
        # A decoder with a classification head finds its last token by the padding token.
        self.causal_lm.config.pad_token_id = self.tokenizer.pad_token_id
        if self.options.head == "choice" and any(
            weight.requires_grad for weight in self.causal_lm.get_output_embeddings().parameters()
        ):
            raise ValueError(
                "lora.targets names the output head, of which head='choice' reads two frozen rows: leave it out"
            )

    def skeleton(self, dtype: str = "bf16") -> LanguageModule:
        made = cast(SelectorModule, super().skeleton(dtype))
        if self.num_labels is None:
            made.choice_rows = torch.tensor([0, 1])  # the cost is the same for any two rows
        return made

    def sketch_batch(self, shape: BatchShape) -> Batch:
        return skeleton.make_texts(shape) | {"labels": torch.zeros(shape.examples, dtype=torch.int64)}

    def choice_logits(self, batch: Batch) -> Tensor:
        """Return the active adapter's logits of A and B, ``(batch, 2)``."""
        if self.choice_rows is None:
            texts = {name: batch[name] for name in TEXTS if name in batch}
            logits: Tensor = self.network(**texts).logits.float()
        else:
            rows = self.choice_rows.to(batch["input_ids"].device)
            ids, mask, compute = batch["input_ids"], batch["attention_mask"], self.shared_prefix.neighbours
            logits = readout.choice_logits(self.causal_lm, ids, mask, rows, compute)
        prior, temperature = self.asked["prior"], self.asked["temperature"]
        if (prior, temperature) == (0.0, 1.0):
            return logits
        return (logits - logits.new_tensor([0.0, prior])) / temperature  # the prior is of B

    def ensemble_logits(self, batch: Batch) -> Tensor:
        """Return the logits of A and B by each of the U adapters, ``(batch, U, 2)``; the active adapter stays active."""
        if len(self.adapter_names) == 1:
            return self.choice_logits(batch)[:, None]  # [batch, 1, 2]
        logits = []
        with adapters.keep_active(self.network) as switch:
            for name in self.adapter_names:
                switch(name)
                logits.append(self.choice_logits(batch))
        return torch.stack(logits, dim=1)

    def example_losses(self, batch: Batch) -> Tensor:
        """Return the active adapter's cross-entropy over the two choices, ``(batch,)``."""
        self._check_batch(batch)
        return choice_loss(self._of_loss(self.choice_logits(batch), batch), batch["labels"])

    def sketch_losses(self, batch: Batch) -> Tensor:
        return choice_loss(self.choice_logits(batch), batch["labels"])  # a sketched batch has no orders

    def _of_loss(self, logits: Tensor, batch: Batch) -> Tensor:
        return logits if self.options.orders == "one" else average_orders(logits, batch.get("orders"))

    def evaluation(self, batch: Batch) -> dict[str, Tensor]:
        return {"logits": self.ensemble_logits(batch)}

    def evaluate_batch(self, stage: str, batch: Batch) -> dict[str, Tensor]:
        """Log the means and return which examples are decided correctly.

        Returns:
            What `fedlight.modules.choices.log_choices` returns; and ``orders`` and ``labels`` of the batch, ``(batch,)``,
                where it has orders.
        """
        logits = self.evaluated(batch)["logits"]
        if "orders" in batch and logits.shape[1] % 2:  # an even number of selectors has no majority
            self._orders(stage).update(batch["orders"], logits, batch["labels"])
        orders = {name: batch[name] for name in ("orders", "labels") if "orders" in batch}
        of_loss = self._of_loss(logits, batch)
        return {**log_choices(self, stage, logits, batch["labels"], of_loss), **orders}

    def on_validation_epoch_start(self) -> None:
        super().on_validation_epoch_start()
        self._orders("val").reset()  # an interrupted pass may have left examples

    def on_test_epoch_start(self) -> None:
        super().on_test_epoch_start()
        self._orders("test").reset()

    def on_validation_epoch_end(self) -> None:
        log_both_orders(self._orders("val"), self, "val")

    def on_test_epoch_end(self) -> None:
        log_both_orders(self._orders("test"), self, "test")

    def _orders(self, stage: str) -> BothOrders:
        return cast(BothOrders, self.both_orders[stage])

    def predict_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Return the log-probabilities of A and B, ``(batch, 2)``, or ``(batch, 2, U)`` with several adapters."""
        log_probs = self.ensemble_logits(batch).log_softmax(dim=2).transpose(1, 2)
        return log_probs.squeeze(dim=2) if len(self.adapter_names) == 1 else log_probs

    def save_adapter(self, folder: str | Path) -> None:
        """Write the adapter as `LanguageModule.save_adapter` does, and beside it how it was trained."""
        super().save_adapter(folder)
        write_json(Path(folder) / ASKED, self.asked)

    def generate(self, *args: Any, **kwargs: Any) -> list[list[str]]:
        """Return completions, see `LanguageModule.generate`; raise ValueError with ``head="classifier"``."""
        if self.options.head == "classifier":
            raise ValueError("head='classifier' does not write text: use head='choice' or an SFTModule")
        return super().generate(*args, **kwargs)


def read_letters(file: str) -> tuple[float, float]:
    """Return prior and temperature of a file of letters; raise ValueError for another file."""
    try:
        letters = json.loads(read_text(Path(file)))
        prior, temperature = float(letters["prior"]), float(letters["temperature"])
        check_range("prior", abs(prior), 0, math.inf)
        check_range("temperature", temperature, 0, math.inf, above_low=True)
        return prior, temperature
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"letters={file!r} has no prior and temperature: write it by calibrate_letters"
        ) from error


def read_asked(adapter: str | Path) -> dict[str, Any]:
    """Return how an adapter was trained, by its folder, or by that of several with it among them; {} where neither says."""
    folder = Path(adapter)
    above = [folder.parent] if folder.name.startswith("adapter") else []  # one of several
    for file in (place / ASKED for place in (folder, *above)):
        if file.is_file():
            return read_json(
                file, f"remove it, and give the settings of the training of adapter={str(adapter)!r}"
            )
    return {}


def refuse_other_training(trained: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Raise ValueError where a selector is read by settings that its training did not have.

    Examples:
        >>> refuse_other_training({"choices": ["a", "b"]}, {"choices": ["A", "B"]})
        Traceback (most recent call last):
        ...
        ValueError: the selectors of adapter were trained with choices=['a', 'b'], not ['A', 'B']: set choices to that; ...
    """
    for name, value in settings.items():
        if name in trained and trained[name] != value:
            raise ValueError(
                f"the selectors of adapter were trained with {name}={trained[name]!r}, not {value!r}: set {name} to that; "
                f"to train the adapter anew, remove {ASKED} from its folder"
            )


def refuse_one_order(trained: Mapping[str, Any], orders: str) -> None:
    """Raise ValueError where pairs are shown in one order to a selector that was trained on the mean of both.

    Examples:
        >>> refuse_one_order({"orders": "one"}, "both")
        >>> refuse_one_order({"orders": "both"}, "one")
        Traceback (most recent call last):
        ...
        ValueError: orders='one', but the selectors were trained on the mean of both orders, in which a preference for ...
    """
    if trained["orders"] == "both" and orders == "one":
        raise ValueError(
            "orders='one', but the selectors were trained on the mean of both orders, in which a preference for a position "
            "cancels: set orders to both"
        )


def check_odd(num_adapters: int) -> None:
    """Raise ValueError for an even number of adapters, whose votes can tie.

    Examples:
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


def choice_tokens(tokenizer: Any, choices: Sequence[str]) -> list[int]:
    """Return the one token of each choice after ``": "``.

    Raises:
        ValueError: the choices are not one distinct token each.
    """
    rows = [tokenizer(f": {choice}", add_special_tokens=False)["input_ids"] for choice in choices]
    words = [tokenizer.decode(row[-1:]).strip() for row in rows]
    if words != list(choices) or rows[0][:-1] != rows[1][:-1] or rows[0] == rows[1]:
        raise ValueError(
            f"choices={list(choices)}: after ': ' this tokenizer does not make one distinct token of each, but "
            f"{' and '.join(str(tokenizer.convert_ids_to_tokens(row)) for row in rows)}; take other words or models"
        )
    return [row[-1] for row in rows]
