"""LoRA adapters on a frozen base: new, read from a PEFT folder, or merged into the base.

E. Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022, https://arxiv.org/abs/2106.09685:
``h = W x + (alpha / r) B A dropout(x)``. What is trained is fp32 whatever the base is in: in bf16 a step of 1e-5 is
less than half a unit in the last place of most entries and would be rounded away.
"""

import hashlib
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedlight.modules.settings import check_choice
from fedlight.modules.streams import own_stream

WEIGHTS = "adapter_model.safetensors"


def new_adapter(
    network: Any,
    *,
    rank: int,
    alpha: float,
    dropout: float,
    targets: str | list[str],
    task: str,
    new_weights: Sequence[str],
    seed: int,
) -> Any:
    """Puts a LoRA adapter on a base; it changes nothing until it is trained, as B is 0.

    Args:
        network: the base.
        rank: r.
        alpha: see above.
        dropout: on the adapter's input, in training.
        targets: ``"all-linear"`` (every linear layer but the head), a regular expression, or names of layers.
        task: ``"CAUSAL_LM"`` or ``"SEQ_CLS"``.
        new_weights: parameters of the base that no folder has; their modules are trained whole and saved too.
        seed: of A. Adapters of one seed start equal.

    Raises:
        ValueError: no layer has one of the names.
    """
    from peft import LoraConfig, TaskType, get_peft_model

    if not isinstance(targets, str):
        layers = sorted({name.rpartition(".")[2] for name, _ in network.named_modules()} - {""})
        for target in targets:
            check_choice("lora_targets", target.rpartition(".")[2], layers)
    whole = {name.rpartition(".")[0] for name in new_weights}
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=targets,
        task_type=TaskType(task),
        # PEFT trains a module named classifier or score by itself.
        modules_to_save=[
            name for name in sorted(whole) if not {"classifier", "score"} & set(name.split("."))
        ],
    )
    with _peft_warnings(), own_stream(seed, network.device):
        return _trained_in_fp32(get_peft_model(network, config))


def load_adapter(network: Any, folder: str, task: str, setting: str = "adapter") -> Any:
    """Puts the adapter of a PEFT folder on a base, to be trained further.

    Raises:
        FileNotFoundError: there is no adapter in the folder.
        ValueError: it is of another kind, or for another base.
    """
    from peft import PeftConfig, PeftModel

    check_folder(folder, setting)
    config = PeftConfig.from_pretrained(folder)
    if config.peft_type != "LORA" or config.task_type != task:
        kind = f"{config.peft_type.value} for {config.task_type}"
        raise ValueError(f"{setting}={folder!r} is {kind}; needed is LORA for {task}")
    try:
        with _peft_warnings():
            return _trained_in_fp32(PeftModel.from_pretrained(network, folder, is_trainable=True))
    except (RuntimeError, ValueError, UserWarning) as error:
        reason = str(error).strip().splitlines()[0][:200]
        raise ValueError(f"{setting}={folder!r} does not fit this base: {reason}") from None


def merge_adapter(network: Any, folder: str, task: str) -> Any:
    """Adds the adapter of a PEFT folder to the base's own weights; the result is a base again.

    Raises:
        FileNotFoundError: there is no adapter in the folder.
        ValueError: it does not fit.
    """
    return load_adapter(network, folder, task).merge_and_unload().requires_grad_(False)


def check_merge(merge: bool, adapter: str | None, base: str) -> None:
    """Refuses to merge nothing, or into rounded weights.

    Raises:
        ValueError: see above.
    """
    if merge and adapter is None:
        raise ValueError("merge_adapter=true needs an adapter to merge: set adapter to its folder")
    if merge and base != "plain":
        raise ValueError(
            f"merge_adapter=true with base={base!r} would round the merged weights: merge into a plain base, "
            "save that with save_merged, and give the folder as model"
        )


def check_folder(folder: str, setting: str) -> None:
    """Refuses a folder without an adapter.

    Raises:
        FileNotFoundError: see above.
    """
    for name in ("adapter_config.json", WEIGHTS):
        if not (Path(folder) / name).is_file():
            raise FileNotFoundError(
                f"{setting}={folder!r} has no {name}: give a folder written by save_adapter"
            )


def adapter_checksum(folder: str) -> str:
    """Sixteen hex digits of the weights in a PEFT folder."""
    return hashlib.blake2b((Path(folder) / WEIGHTS).read_bytes(), digest_size=8).hexdigest()


def trained_parameters(network: nn.Module) -> dict[str, nn.Parameter]:
    """What is trained: everything that requires a gradient, by name."""
    return {name: weight for name, weight in network.named_parameters() if weight.requires_grad}


def _trained_in_fp32(network: Any) -> Any:
    for name, weight in trained_parameters(network).items():
        weight.data = weight.data.float()
        if "lora_" not in name:  # PEFT casts the input of LoRA, not of modules that are trained whole
            network.get_submodule(name.rpartition(".")[0]).register_forward_pre_hook(_cast_input)
    return network.train()


def _cast_input(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(value.to(torch.float32) for value in inputs)


@contextmanager
def _peft_warnings() -> Iterator[None]:
    """Silences what PEFT provokes in ``transformers``; makes an error of an adapter that lacks weights."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        warnings.filterwarnings("error", "Found missing adapter keys", UserWarning)
        yield
