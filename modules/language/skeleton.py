"""A language model without weights: what it would take is known before any of it is loaded.

All weights are meta tensors, with shape and number type but no values. A skeleton has the base, the adapters and the
trained head of its module, so that parameters can be counted by part and a training step run on shapes alone.
"""

import functools
import inspect
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fedlight.devices.shape import BatchShape
from fedlight.modules.functional import IGNORED
from fedlight.modules.language import adapter_folders, adapters, base_model


def make_skeleton(module: Any, dtype: str = "bf16") -> Any:
    """A module with the settings of this one, whose base and adapters are meta tensors; only configs are read.

    The base is plain whatever this module's is: a device may have its own number form for it. An adapter that a loaded
    module has, or whose folder is there, gives rank, targets and number; else the settings do.

    Args:
        module: a ``LanguageModule``, loaded or not.
        dtype: of the base: ``fp32``, ``bf16`` or ``fp16``; what is trained is fp32.

    Raises:
        FileNotFoundError: there is no such model.
        OSError: its config cannot be read.
        ValueError: the module's class has another constructor than that of the class it extends.
    """
    options = module.options
    settings = {
        name: value for name, value in options.items() if not name.startswith("_")
    }  # the CLI adds _class_path
    made = _remade(type(module), {**settings, "base": "plain", "dtype": dtype})
    network = _base(options.model, base_model.DTYPES[dtype], options.trust_remote_code, module.num_labels)
    made.network = _with_adapters(network, module)
    return made


def _remade(kind: type, settings: dict[str, Any]) -> Any:
    try:
        inspect.signature(kind).bind(**settings)
    except TypeError as error:
        raise ValueError(
            f"{kind.__name__}.__init__ does not take the settings of its parent ({error}): define "
            f"{kind.__name__}.skeleton(), which returns the module without weights, or let __init__ pass them on as **kwargs"
        ) from None
    return kind(**settings)


def _base(model: str, dtype: torch.dtype, trust_remote_code: bool, num_labels: int | None) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    config = base_model.read_config(model, trust_remote_code, num_labels)
    loader = AutoModelForCausalLM if num_labels is None else AutoModelForSequenceClassification
    if num_labels is not None and config.pad_token_id is None:
        config.pad_token_id = 0  # without it transformers takes single texts only
    with torch.device("meta"):
        network = loader.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    return network


def _with_adapters(network: Any, module: Any) -> Any:
    options = module.options
    planned: dict[str, Any] = {
        "rank": options.lora_rank,
        "alpha": options.lora_alpha,
        "dropout": options.lora_dropout,
        "targets": options.lora_targets,
        "new_weights": (),
    }
    config = _known_config(module)
    if config is not None:
        targets = config.target_modules
        planned = {
            "rank": config.r,
            "alpha": config.lora_alpha,
            "dropout": config.lora_dropout,
            "targets": targets if isinstance(targets, str) else sorted(targets),
            "new_weights": [f"{name}.weight" for name in config.modules_to_save or ()],
        }
    names = (
        module.adapter_names if config is not None else adapter_folders.adapter_names(options.num_adapters)
    )
    with torch.device("meta"):
        return adapters.new_adapters(network, names=names, task=module.task, seed=0, **planned)


def _known_config(module: Any) -> Any:
    """PEFT's description of the adapter: of the loaded one, or of the folder to start from; None without either."""
    if module.network is not None:
        return module.network.peft_config[module.adapter_names[0]]
    folder = module.options.adapter
    if folder is None or module.options.merge_adapter or not Path(folder).is_dir():
        return None
    from peft import PeftConfig

    return PeftConfig.from_pretrained(adapter_folders.adapter_folders(folder, "adapter")[0])


def texts(shape: BatchShape) -> dict[str, Tensor]:
    """Texts of that shape, each with one token of padding, as in a batch of texts that differ in length.

    Returns:
        ``input_ids`` and ``attention_mask``, ``(examples, tokens)``.

    Example:
        >>> texts(BatchShape(examples=2, tokens=3))["attention_mask"].tolist()
        [[1, 1, 0], [1, 1, 0]]
    """
    mask = torch.ones(shape.examples, shape.tokens, dtype=torch.int64)
    mask[:, max(1, shape.tokens - 1) :] = 0
    return {"input_ids": torch.zeros_like(mask), "attention_mask": mask}


def responses(shape: BatchShape) -> dict[str, Tensor]:
    """Texts of which so many tokens are labelled; which ones makes no difference to what they cost.

    Raises:
        ValueError: there are more labelled tokens than tokens that have one before them.

    Example:
        >>> responses(BatchShape(examples=2, tokens=3, responses=3))["labels"].tolist()
        [[-100, 0, 0], [-100, 0, -100]]
    """
    most = shape.examples * (shape.tokens - 1)
    if shape.responses > most:
        raise ValueError(f"{shape} has more responses than the {most} tokens that have one before them")
    labels = torch.full((most,), IGNORED)
    labels[: shape.responses] = 0
    first = torch.full((shape.examples, 1), IGNORED)
    return texts(shape) | {"labels": torch.cat([first, labels.view(shape.examples, -1)], dim=1)}


def checkpoint_gradients(causal_lm: Any, enabled: bool) -> None:
    """Lets each layer keep its input alone and compute the rest again in the backward pass, on the same random numbers.

    Raises:
        ValueError: the architecture does not support it.
    """
    # What transformers' own switch does, but that also asks for gradients of the embeddings, each time by a further
    # hook: needed where checkpoints are reentrant, which these are not.
    once_more = functools.partial(checkpoint, use_reentrant=False)
    causal_lm._set_gradient_checkpointing(enable=enabled, gradient_checkpointing_func=once_more)
