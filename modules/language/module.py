"""Language model with LoRA adapters as a LightningModule; subclasses differ in the loss that they train.

The base is loaded in ``configure_model``, that is, not before it is needed. Checkpoints hold the trained weights and a
description of the base, which is read again from its own folder.
"""

import functools
import math
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fedlight.devices.measure.number_type import DTYPES, NumberType, choose_dtype
from fedlight.evaluation.tasks.model import Likelihood
from fedlight.evaluation.tasks.sampling import Completions
from fedlight.modules.evaluation import Results, evaluate_together
from fedlight.modules.functional import joint_key, text_keys
from fedlight.modules.language import adapter_folders, adapters, base_model, checkpoints, scoring, skeleton
from fedlight.modules.language.adapters import Lora
from fedlight.modules.language.base_model import Execution
from fedlight.modules.language.data_checks import (
    check_batch,
    check_max_tokens,
    check_texts,
    check_tokenizer,
)
from fedlight.modules.language.generation import Request, complete, encode_prompts
from fedlight.modules.language.optimizers import Optimization, OptimizedModule
from fedlight.modules.language.readout import SharedPrefix, check_classifier, check_readout
from fedlight.processes.work import once
from fedlight.stacking.dropout import DropoutMasks
from fedlight.stacking.stacked_adapters import StackedAdapters
from fedlight.support.checkpoint_files import check_readable
from fedlight.support.checks import check_choice, check_precision, check_range
from fedlight.support.needs import ReadsModel
from fedlight.support.seeding import derive_seed
from fedlight.support.settings_record import made_of

Batch = dict[str, Any]
Texts = Sequence[str]
Scores = list[list[Likelihood]]


class LanguageModule(ReadsModel, OptimizedModule):
    """Language model that is trained, saved and asked for text; a subclass defines ``example_losses``.

    Args:
        model: hub name, folder, or ``"toy"`` for the embedded model.
        base: ``plain``, ``int8`` or ``nf4``: the number form of the frozen base.
        lora: rank, scale, dropout and layers of new adapters.
        lr: learning rate, above 0.
        optimizer: optimizer and schedule of the learning rate.
        dtype: number type of the base: ``fp32``, ``bf16``, ``fp16`` or ``auto``, the fastest here, see
            `fedlight.devices.measure.number_type`. A run that goes on from a checkpoint keeps what ``auto`` was on a CPU.
        adapter: a folder of `save_adapter` to start from, with its rank, alpha, dropout and targets. A folder with
            several adapters decides their number; from a folder with one all ``num_adapters`` start.
        merge_adapter: add ``adapter`` to the base's weights and train a new one, instead of training it further.
        completions: number and sampling of the texts that ``predict_step`` writes to a prompt.
        seed: seed of new weights, of dropout and of the completions.
        num_adapters: adapters on the one base, equal at the start; one at a time is active, see `use_adapter`.
        execution: code of the model, memory and time.

    Attributes:
        task: PEFT's name for the kind of model.
        num_labels: outputs of a classification head; None for a language model's own head.
        dropout_masks: masks of the adapters' dropout.
        shared_prefix: hidden states of texts that begin alike, by ``execution.prefix``.
        batch_form: entry of a batch -> its dimensions, 0 where they are not checked.
        data_hint: the same in words, with the datamodule and the setting that provide it.

    Raises:
        ValueError: a setting is misspelt or out of range, or two do not go together.
    """

    task = "CAUSAL_LM"
    num_labels: int | None = None
    batch_form: ClassVar[Mapping[str, int]] = {}
    data_hint = ""
    maps = ("lora", "optimizer", "completions", "execution")

    def __init__(
        self,
        model: str,
        base: str = "plain",
        lora: Lora = Lora(),
        lr: float = 1e-5,
        optimizer: Optimization = Optimization(),
        dtype: str = "auto",
        adapter: str | None = None,
        merge_adapter: bool = False,
        completions: Completions = Completions(),
        seed: int = 0,
        num_adapters: int = 1,
        execution: Execution = Execution(),
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        execution = made_of(Execution, execution)
        self.save_plain(
            lora=made_of(Lora, lora),
            optimizer=made_of(Optimization, optimizer),
            completions=made_of(Completions, completions),
            execution=execution,
        )
        check_choice("base", base, base_model.BASES)
        check_choice("dtype", dtype, ("auto", *DTYPES))
        check_range("num_adapters", num_adapters, 1, float("inf"))
        check_range("lr", lr, 0, float("inf"), above_low=True)
        adapter_folders.check_merge(merge_adapter, adapter, base)
        self.network: Any = None  # until `configure_model`
        self.tokenizer: Any = None
        self.base: dict[str, Any] = {}
        self._number_type: NumberType | None = None
        self.dropout_masks = DropoutMasks()
        self.shared_prefix = SharedPrefix(execution.prefix)
        self._warned_of_length = False
        self._evaluated: Results = deque()
        self._train_sums: dict[str, list[tuple[Tensor, list[int]]]] | None = None

    # Loading

    def setup(self, stage: str) -> None:
        check_precision(str(self.trainer.precision))
        options, data = self.options, getattr(self.trainer, "datamodule", None)
        config = base_model.read_config(options.model, options.execution["trust_remote_code"])
        check_max_tokens(config, options.model, data)
        self._load_tokenizer()
        check_tokenizer(self.tokenizer, data)
        if self.network is None:  # a base that is loaded may have the type of a checkpoint
            # Processes that measure may find unlike types. The default device is the trainer's in configure_model alone.
            self._number_type = NumberType(*once(lambda: tuple(self._choose_dtype(self.device))))

    def _choose_dtype(self, device: torch.device) -> NumberType:
        config = base_model.read_config(self.options.model, self.options.execution["trust_remote_code"])
        return choose_dtype(self.options.dtype, device, base_model.width_of(config))

    def configure_model(self) -> None:
        if self.network is not None:
            return
        self._load_tokenizer()
        names = self.adapter_names  # refuses a folder that does not fit, before the base is loaded
        network, new = self.load_base()
        self.base = {"model": self.options.model, "base": self.options.base}
        self.base["checksum"] = checkpoints.fingerprint(network, skip=new)
        if self.options.merge_adapter:
            self.base["merged adapter"] = adapter_folders.adapter_checksum(self.options.adapter)
        self.network = adapters.add_adapters(network, names, self.options, self.task, new)
        if self.options.execution["gradient_checkpointing"]:
            self.checkpoint_gradients(True)
        from fedlight.stacking.fast_layers import use_fast_layers  # imports PEFT

        use_fast_layers(self.network, self.dropout_masks)

    def _load_tokenizer(self) -> None:
        if self.tokenizer is None:
            trusts = self.options.execution["trust_remote_code"]
            self.tokenizer = base_model.load_tokenizer(self.options.model, trusts)

    def load_base(self) -> tuple[Any, list[str]]:
        """Return the base without an adapter, and the names of its parameters that are in no folder."""
        options = {name: self.options[name] for name in ("model", "base", "seed")}
        options["trust_remote_code"] = self.options.execution["trust_remote_code"]
        self._number_type = self._number_type or self._choose_dtype(torch.get_default_device())
        base_model.log_number_type(self.options.base, self._number_type)
        dtype = self._number_type.name
        network, new = base_model.load_base(**options, dtype=dtype, num_labels=self.num_labels)
        if self.num_labels is None:
            check_readout(network, self.options.model)
        elif not hasattr(network, "score"):  # a language model's head reads states before padding alone
            check_classifier(network, self.options.model)
        return network, new

    # Cost of a step on a device: fedlight.devices.cost.Sketched and Checkpointed

    def skeleton(self, dtype: str = "bf16") -> "LanguageModule":
        """Return this module with meta tensors as weights; see `fedlight.modules.language.skeleton.make_skeleton`."""
        return skeleton.make_skeleton(self, dtype)

    def sketch_losses(self, batch: Batch) -> Tensor:
        """Return one loss per example, ``(batch,)``, by all that a training step computes."""
        return self.example_losses(batch)

    def checkpoint_gradients(self, enabled: bool) -> None:
        """Keep all activations, or only the inputs of the layers and recompute the rest on the same random numbers.

        With ``execution.gradient_checkpointing`` they are always recomputed.

        Raises:
            ValueError: the architecture does not support it.
        """
        # The public switch of transformers would also add a hook for gradients of the embeddings on each call, which only
        # reentrant checkpoints need.
        contexts = self.dropout_masks.checkpoint_contexts
        function = functools.partial(checkpoint, use_reentrant=False, context_fn=contexts)
        enabled = enabled or self.options.execution["gradient_checkpointing"]
        self.causal_lm._set_gradient_checkpointing(enable=enabled, gradient_checkpointing_func=function)

    @property
    def causal_lm(self) -> Any:
        """Model of ``transformers``, with the adapter in its layers."""
        return self.network.get_base_model()

    @property
    def adapter_names(self) -> list[str]:
        """``["default"]``, or with several ``["adapter0", "adapter1", ...]``: a part of their parameters' names."""
        if self.network is not None:
            return list(self.network.peft_config)
        options = self.options
        return adapter_folders.plan_names(options.num_adapters, options.adapter, options.merge_adapter)

    def use_adapter(self, name: str) -> None:
        """Make one adapter the active one: the module computes and trains with it alone.

        The others stay in the optimizer and in checkpoints; they have no gradients, so that no optimizer moves them.

        Raises:
            ValueError: the module has no such adapter.
        """
        adapters.activate(self.network, name)

    # Training

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        self._check_batch(batch)
        # On a GPU, reading a value waits for all its work.
        warning = check_texts(self.causal_lm.config, batch, reads=batch_idx == 0 or self.device.type == "cpu")
        if warning and not self._warned_of_length:
            self._warned_of_length = True
            rank_zero_warn(warning)

    def on_validation_batch_start(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._check_batch(batch)

    def on_test_batch_start(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._check_batch(batch)

    def _check_batch(self, batch: Batch) -> None:
        if batch:  # that of tasks without a loss is empty
            check_batch(batch, self.batch_form, type(self).__name__, self.data_hint)

    def example_metrics(self, batch: Batch) -> dict[str, Tensor]:
        """Return the logged metrics, one value per example, ``(batch,)`` each; ``loss`` is among them."""
        return {"loss": self.example_losses(batch)}

    def batch_key(self, batch: Batch) -> int:
        """Return a 63-bit key of a batch's texts."""
        return joint_key(*text_keys(batch["input_ids"], batch["attention_mask"]))

    def dropout_seed(self, batch: Batch) -> int:
        """Return the seed of dropout's masks: of the epoch and the texts, not of the client's place among the others."""
        return derive_seed(self.options.seed, "dropout", self.current_epoch, self.batch_key(batch))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        with self.dropout_masks.seeded(self.dropout_seed(batch)):
            metrics = self.example_metrics(batch)
        self.log_training(metrics)
        return metrics["loss"].mean()

    def before_parts(self, batch: Batch) -> None:
        """Settle what is found out once, from a whole batch, where processes train parts of its rows.

        The first step on a whole batch has been computed by now.
        """
        self.shared_prefix.keep()

    def log_training(self, metrics: dict[str, Tensor], counts: Sequence[int] | None = None) -> None:
        """Log the metrics of a training batch, ``(batch,)`` each, now or with all others of the visits under way.

        ``counts`` are the examples of each client where several clients share the batch.
        """
        if self._train_sums is None:
            self.log_means("train", metrics)
            return
        for name, values in metrics.items():
            sizes = [len(values)] if counts is None else [*counts]
            sums = torch.stack([part.sum() for part in values.detach().float().split(sizes)])
            self._train_sums.setdefault(name, []).append((sums, sizes))

    def sum_training(self) -> None:
        """Sum the metrics of training batches until `training_sums`, instead of logging each batch."""
        self._train_sums = {}

    def training_sums(self) -> list[dict[str, tuple[float, int]]]:
        """Return sum and number of examples of each metric since `sum_training`, client after client.

        From now on each batch is logged again. The list is empty without a batch.
        """
        parts, self._train_sums = self._train_sums or {}, None
        if not parts:
            return []
        # One transfer from the device for all batches.
        batches = iter(torch.stack([sums for logged in parts.values() for sums, _ in logged]).tolist())
        totals: list[dict[str, tuple[float, int]]] = [{} for _ in next(iter(parts.values()))[0][1]]
        for name, logged in parts.items():
            sums, counts = [next(batches) for _ in logged], [counts for _, counts in logged]
            for client, metrics in enumerate(totals):
                total = math.fsum(each[client] for each in sums)  # exact in any order of batches
                metrics[name] = total, sum(each[client] for each in counts)
        return totals

    def validation_step(self, batch: Batch, batch_idx: int) -> Any:
        return self.evaluate_batch("val", batch)

    def test_step(self, batch: Batch, batch_idx: int) -> Any:
        return self.evaluate_batch("test", batch) if batch else None

    def on_validation_epoch_start(self) -> None:
        self._evaluated = evaluate_together(self, "val")

    def on_test_epoch_start(self) -> None:
        self._evaluated = evaluate_together(self, "test")

    def evaluation(self, batch: Batch) -> dict[str, Tensor]:
        """Return the results of a validation or test step on a batch, each with a first dimension of examples."""
        return self.example_metrics(batch)

    def evaluated(self, batch: Batch) -> dict[str, Tensor]:
        """Return the `evaluation` of the present step's batch, which another process may have computed."""
        if not self._evaluated:
            return self.evaluation(batch)
        key, results = self._evaluated.popleft()
        if key != self.batch_key(batch):
            raise ValueError(
                "a validation or test loader gives other batches when it is read again, so processes cannot share them: "
                "make its order fixed, or set trainer.devices=1"
            )
        return {name: values.to(self.device) for name, values in results.items()}

    def evaluate_batch(self, stage: str, batch: Batch) -> Any:
        """Log the metrics of a validation or test batch; return the step's output."""
        self.log_means(stage, self.evaluated(batch))

    # Text

    def generate(
        self,
        prompts: Texts,
        n: int = 1,
        temperature: float = 0.7,
        top_p: float = 1.0,
        max_new_tokens: int = 80,
        seed: int = 0,
        raw: bool = False,
        stop: Texts = (),
        strip: bool = True,
    ) -> list[list[str]]:
        """Complete each prompt n times, ``raw`` without the adapter; see `fedlight.modules.language.generation`."""
        self.configure_model()
        settings: dict[str, Any] = {"n": n, "temperature": temperature, "top_p": top_p}
        settings |= {"max_new_tokens": max_new_tokens, "stop": stop, "strip": strip}
        requests = [Request(prompts, seed)]
        with adapters.disable_adapters(self.network, raw):
            [texts] = complete(self.causal_lm, self.tokenizer, requests, **settings)
        return texts

    def generate_for(
        self,
        states: Sequence[Mapping[str, Tensor]],
        prompts: Sequence[Texts],
        seeds: Sequence[int],
        **settings: Any,
    ) -> list[list[list[str]]]:
        """Complete the prompts of several clients in one batch, each client's by its own weights.

        A client's texts are those of `generate` with its weights, its seed and the same settings, up to ties of rounding.
        ``states`` has of each client the trained weights that differ from the module's, which keeps its own.

        Raises:
            ValueError: the adapters cannot be stacked (`fedlight.stacking.StackedAdapters`), or see `generate`.
        """
        self.configure_model()
        asked = [k for k, prompt in enumerate(prompts) if prompt]
        requests = [Request(prompt, seed) for prompt, seed in zip(prompts, seeds, strict=True)]
        stacked = StackedAdapters(self, adapters.trained_parameters(self))
        if not asked:
            return [[] for _ in requests]
        gradients = {weight: weight.grad for weight in self.parameters() if weight.grad is not None}
        stacked.enter([states[k] for k in asked], [None] * len(asked))
        try:
            set_rows = functools.partial(stacked.set_rows, seeds=None)
            return complete(self.causal_lm, self.tokenizer, requests, set_rows=set_rows, **settings)
        finally:
            stacked.leave()
            for weight, gradient in gradients.items():
                weight.grad = gradient

    def fits(self, prompts: Texts, new_tokens: int) -> list[bool]:
        """Return whether each prompt and ``new_tokens`` more tokens fit into the model."""
        self.configure_model()
        limit = getattr(self.causal_lm.config, "max_position_embeddings", None)
        rows = encode_prompts(self.tokenizer, prompts)
        return [limit is None or len(row) + new_tokens <= limit for row in rows]

    def log_likelihoods(self, prompts: Texts, continuations: Sequence[Texts], raw: bool = False) -> Scores:
        """Score each continuation, ``raw`` without the adapter; see `fedlight.modules.language.scoring`."""
        self.configure_model()
        with adapters.disable_adapters(self.network, raw):
            return scoring.log_likelihoods(
                self.causal_lm, self.tokenizer, prompts, continuations, shared_prefix=self.shared_prefix
            )

    def predict_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Any:
        if "prompt" not in batch:
            raise ValueError(
                f"{type(self).__name__} answers prompts, and these data have none: take a PromptDataModule, as in "
                "completions.yaml"
            )
        sampling = dict(self.options.completions)
        # Not from batch_idx: a run that is resumed at the tenth batch counts it as the first.
        seed = derive_seed(self.options.seed, "completions", *batch["prompt"])
        stop = batch.get("stop", ())
        return self.generate(batch["prompt"], n=sampling.pop("number"), seed=seed, stop=stop, **sampling)

    # Saving

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the trained weights; the base is not among them."""
        return {name: weight.detach() for name, weight in adapters.trained_parameters(self).items()}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Copy a `state_dict` into the module; raise ValueError where names or shapes differ."""
        checkpoints.copy_state(state_dict, adapters.trained_parameters(self))
        return nn.modules.module._IncompatibleKeys([], [])

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[checkpoints.BASE_KEY] = dict(self.base)
        if self._number_type is not None:
            checkpoint[checkpoints.NUMBER_TYPE_KEY] = self._number_type.name

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoints.check_base(checkpoint.get(checkpoints.BASE_KEY), self.base)
        self._keep_number_type(checkpoint.get(checkpoints.NUMBER_TYPE_KEY))
        if self._trainer is not None and self._trainer.state.fn == "fit":
            checkpoints.check_optimizer_settings(checkpoint["hyper_parameters"], self.hparams)

    def _keep_number_type(self, saved: str | None) -> None:
        """Load the base anew where ``auto`` was another type on the CPU of the run that is continued."""
        # On a CPU auto is measured, and another machine may find another type.
        is_measured = self.options.dtype == "auto" and self.causal_lm.device.type == "cpu"
        if not is_measured or saved not in ("fp32", "bf16"):
            return
        if self._number_type is None or saved != self._number_type.name:
            self._number_type = NumberType(saved, "as in the checkpoint (dtype: auto)")
            self.network = None  # configure_model loads where there is none
            self.configure_model()

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]
        cls, checkpoint_path: str | Path, *, weights_only: bool = True, **kwargs: Any
    ) -> "LanguageModule":
        """Return the module with the base from its folder and the adapter from the checkpoint.

        Args:
            checkpoint_path: a file that a Trainer saved.
            weights_only: unpickle nothing but tensors and plain values.
            kwargs: constructor arguments that replace those in the checkpoint, such as ``model`` where it moved.

        Raises:
            FileNotFoundError: the file or the model does not exist.
            ValueError: the file is damaged, or belongs to another model.
        """
        check_readable(checkpoint_path)
        return super().load_from_checkpoint(checkpoint_path, weights_only=weights_only, **kwargs)

    def save_adapter(self, folder: str | Path) -> None:
        """Write the adapter as a folder that ``PeftModel.from_pretrained`` and ``adapter=`` read.

        Several adapters become one such folder each, ``folder/adapter0`` and so on; ``adapter=`` reads them all.

        Raises:
            ValueError: the folder has other adapters.
        """
        self.configure_model()
        adapter_folders.save_adapters(self.network, folder)

    def save_merged(self, folder: str | Path) -> None:
        """Write base and adapter as one model, which ``model=`` reads; the module itself stays as it is.

        Raises:
            ValueError: the base is quantized, or there are several adapters.
        """
        self.configure_model()
        adapters.merge_copy(self.network, self.options.base).save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
