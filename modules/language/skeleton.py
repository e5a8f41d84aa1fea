"""Skeletons: language models without weights, whose parameters and costs are counted before anything is loaded.

All weights are meta tensors, with shape and number type but no values. A skeleton has the base, the adapters and the
trained head of its module, so that parameters can be counted by part and a training step can run on shapes alone.
"""

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedlight.devices.measure.number_type import DTYPES
from fedlight.devices.quantization import HEADS
from fedlight.devices.shape import BatchShape
from fedlight.modules.functional import IGNORED
from fedlight.modules.language import adapters, base_model
from fedlight.modules.language.adapter_folders import find_adapters, name_adapters


def make_skeleton(module: Any, dtype: str = "bf16") -> Any:
    """Return a module with the same settings whose base and adapters are meta tensors; only configs are read.

    The base is plain, whatever the module's form: a device may have another. Rank, targets and number of adapters come from
    the loaded adapter or the folder of ``adapter``, without either from the settings. ``dtype`` is the number type of the
    base, ``fp32``, ``bf16`` or ``fp16``; trained weights are fp32.

    Raises:
        FileNotFoundError: the model does not exist.
        OSError: the model's config cannot be read.
        ValueError: the module's class has another constructor than the class that it extends.
    """
    options = module.options
    settings = {name: value for name, value in options.items() if not name.startswith("_")}  # _class_path
    made = _construct(type(module), {**settings, "base": "plain", "dtype": dtype})
    network = _make_base(
        options.model, DTYPES[dtype], options.execution["trust_remote_code"], module.num_labels
    )
    made.network = _add_adapters(network, module)
    if options.execution["gradient_checkpointing"]:
        made.checkpoint_gradients(True)
    return made


def _construct(kind: type, settings: dict[str, Any]) -> Any:
    try:
        inspect.signature(kind).bind(**settings)
    except TypeError as error:
        raise ValueError(
            f"{kind.__name__}.__init__ does not take the settings of its parent ({error}): define "
            f"{kind.__name__}.skeleton(), which returns the module without weights, or let __init__ pass them on as **kwargs"
        ) from None
    return kind(**settings)


def _make_base(model: str, dtype: torch.dtype, trust_remote_code: bool, num_labels: int | None) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    config = base_model.read_config(model, trust_remote_code, num_labels)
    loader = AutoModelForCausalLM if num_labels is None else AutoModelForSequenceClassification
    if num_labels is not None and config.pad_token_id is None:
        config.pad_token_id = 0  # without it transformers takes single texts only
    with torch.device("meta"):
        return loader.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)


def _add_adapters(network: Any, module: Any) -> Any:
    config, new_weights = _find_adapter_config(module), list[str]()
    if config is None:
        names = name_adapters(module.options.num_adapters)
        lora = adapters.get_lora_settings(module.options, module.task)
        heads = [f"{head}.weight" for head in HEADS]  # DeBERTa has none before it is tuned
        new_weights = [name for name, _ in network.named_parameters() if name in heads]
    else:
        names, targets = module.adapter_names, config.target_modules
        new_weights = [f"{name}.weight" for name in config.modules_to_save or ()]
        lora = {name: getattr(config, name) for name in ("r", "lora_alpha", "lora_dropout")}
        lora |= {name: getattr(config, name) for name in ("rank_pattern", "alpha_pattern", "exclude_modules")}
        lora["target_parameters"] = config.target_parameters
        lora["target_modules"] = targets if isinstance(targets, str) else sorted(targets)
        lora["task_type"] = module.task
    with torch.device("meta"):
        return adapters.create_adapters(network, names, lora, new_weights, seed=0)  # no values are drawn


def _find_adapter_config(module: Any) -> Any:
    """Return PEFT's config of the loaded adapter, or of the folder to start from; None without either."""
    if module.network is not None:
        return module.network.peft_config[module.adapter_names[0]]
    folder = module.options.adapter
    if folder is None or module.options.merge_adapter or not Path(folder).is_dir():
        return None
    from peft import PeftConfig

    return PeftConfig.from_pretrained(find_adapters(folder)[0])


def make_texts(shape: BatchShape) -> dict[str, Tensor]:
    """Return texts of that shape, each with one token of padding, as in a batch of texts that differ in length.

    Returns:
        ``input_ids`` and ``attention_mask``, ``(examples, tokens)``.

    Raises:
        ValueError: the lengths of the texts are not known.

    Examples:
        >>> make_texts(BatchShape(examples=2, tokens=3))["attention_mask"].tolist()
        [[1, 1, 0], [1, 1, 0]]
    """
    if not shape.tokens:
        raise ValueError(
            "devices count the tokens of each batch, and these data do not say how long their texts are: derive the "
            "datamodule from FederatedDataModule and set train_lengths, or run without devices"
        )
    mask = torch.ones(shape.examples, shape.tokens, dtype=torch.int64)
    mask[:, max(1, shape.tokens - 1) :] = 0  # texts of a batch differ in length
    return {"input_ids": torch.zeros_like(mask), "attention_mask": mask}


def make_responses(shape: BatchShape) -> dict[str, Tensor]:
    """Return texts with ``shape.responses`` labelled tokens; the cost is the same whichever tokens have labels.

    Raises:
        ValueError: more tokens are labelled than have a token before them, or the texts have none.

    Examples:
        >>> make_responses(BatchShape(examples=2, tokens=3, responses=3))["labels"].tolist()
        [[-100, 0, 0], [-100, 0, -100]]
    """
    texts, most = make_texts(shape), shape.examples * (shape.tokens - 1)
    if shape.responses > most:
        raise ValueError(f"{shape} has more responses than the {most} tokens that have one before them")
    labels = torch.full((most,), IGNORED)
    labels[: shape.responses] = 0
    first = torch.full((shape.examples, 1), IGNORED)
    return texts | {"labels": torch.cat([first, labels.view(shape.examples, -1)], dim=1)}
