"""The frozen base under an adapter: where it is found, in which form it is loaded, what identifies it.

A base is plain (fp32, bf16 or fp16), int8 (T. Dettmers et al., "LLM.int8()", NeurIPS 2022,
https://arxiv.org/abs/2208.07339) or NF4 (T. Dettmers et al., "QLoRA", NeurIPS 2023, https://arxiv.org/abs/2305.14314),
the last two through bitsandbytes. Only safetensors files are read.
"""

import functools
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from fedlight.devices import hardware
from fedlight.devices.quantization import HEADS, quiet_int8
from fedlight.modules.language.streams import own_stream
from fedlight.support.hub_errors import check_hub_name, hub_asked_once

BASES = ("plain", "int8", "nf4")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
COMPUTED = {"plain": "base", "int8": "int8 base with the rest", "nf4": "nf4 base, computed"}


def load_base(
    model: str,
    *,
    base: str,
    dtype: str,
    trust_remote_code: bool,
    num_labels: int | None = None,
    seed: int = 0,
) -> tuple[Any, list[str]]:
    """Loads a base model without any dropout of its own: it is frozen, and ``lora_dropout`` is the dropout of training.

    Args:
        model: hub name, folder, or ``"toy"``.
        base: ``plain``, ``int8`` or ``nf4``.
        dtype: ``auto``, ``fp32``, ``bf16`` or ``fp16``.
        trust_remote_code: run code that comes with the model.
        num_labels: None for a causal language model; else an encoder with a classification head over so many labels.
        seed: of weights that the folder does not have (a new classification head).

    Returns:
        The ``transformers`` model, and the names of its parameters that are new.

    Raises:
        OSError: there is no such model, or the hub cannot be reached.
        ValueError: the folder lacks weights other than those of a classification head.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    where, device = find_model(model), torch.get_default_device()
    number_type = choose_dtype(dtype, device)
    if reason := why_dtype(dtype, device):
        _say_once(f"{COMPUTED[base]} in {reason}")
    loader = AutoModelForCausalLM if num_labels is None else AutoModelForSequenceClassification
    config = read_config(model, trust_remote_code, num_labels)
    with _clear_load_errors(model), hub_asked_once(where), _quiet_transformers(), own_stream(seed, device):
        network, report = loader.from_pretrained(
            where,
            config=config,
            dtype=number_type,
            use_safetensors=True,
            output_loading_info=True,
            trust_remote_code=trust_remote_code,
            **_quantization(base, number_type, device, num_labels is not None),
        )
    if base == "nf4":
        _train_after_validation(network)
    new = sorted(report["missing_keys"])
    if num_labels is None and new:
        raise ValueError(f"model={model!r} lacks weights of a causal language model: {', '.join(new[:3])}")
    return network, new


def read_config(model: str, trust_remote_code: bool = False, num_labels: int | None = None) -> Any:
    """The ``transformers`` config of a model, every dropout rate 0.

    Args:
        model: see :func:`load_base`, as for the others.
        trust_remote_code: run code that comes with the model.
        num_labels: outputs of a classification head; None without one.

    Raises:
        OSError: see :func:`load_base`.
    """
    from transformers import AutoConfig

    where, labels = find_model(model), {} if num_labels is None else {"num_labels": num_labels}
    with _clear_load_errors(model), hub_asked_once(where), _quiet_transformers():
        config = AutoConfig.from_pretrained(where, trust_remote_code=trust_remote_code, **labels)
    if num_labels is not None:
        config.use_cache = (
            False  # for generating text; transformers warns where activations are computed twice
        )
    return without_dropout(config)


def load_tokenizer(model: str, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a model; without a padding token it pads with its end token.

    Raises:
        OSError: see :func:`load_base`.
        ValueError: it has neither padding nor end token.
    """
    from transformers import AutoTokenizer

    where = find_model(model)
    with _clear_load_errors(model), hub_asked_once(where), _quiet_transformers():
        tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=trust_remote_code)
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ValueError(
                f"tokenizer of model={model!r} has neither pad_token nor eos_token: set one of them"
            )
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def find_model(model: str) -> str:
    """A folder or hub name that ``transformers`` can load, checked within seconds and before anything is read.

    Raises:
        FileNotFoundError: ``model`` is a path, and no model is there.
        OSError: there is no such hub name, or the hub cannot be reached.
    """
    if model == "toy":
        from fedlight.toy import MODEL

        return str(MODEL)
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise FileNotFoundError(
                f"model={model!r}: the folder has no config.json; give a folder of save_pretrained"
            )
        return str(path)
    check_hub_name(model)
    return model


def choose_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The number type of an unquantized weight, and of the products with an NF4 one.

    ``auto`` is bf16 on a GPU that computes in it and fp16 on an older one. On every CPU it is fp32: with bf16 where there
    are instructions for it, a run's figures would change with the processor, to save less than a third of the time
    (``benchmarks/number_types.py``).

    Args:
        dtype: ``auto``, ``fp32``, ``bf16`` or ``fp16``.
        device: that the base is loaded on.

    Example:
        >>> choose_dtype("auto", torch.device("cpu")), choose_dtype("bf16", torch.device("cpu"))
        (torch.float32, torch.bfloat16)
    """
    if dtype != "auto":
        return DTYPES[dtype]
    if device.type == "cuda":
        return torch.bfloat16 if hardware.computes_bf16(device) else torch.float16
    return torch.float32


def why_dtype(dtype: str, device: torch.device) -> str:
    """What :func:`choose_dtype` chose and why, for people; empty where they chose themselves and it is not slow.

    Example:
        >>> why_dtype("auto", torch.device("cpu")), why_dtype("fp32", torch.device("cpu"))
        ('fp32, as on every CPU (dtype: auto)', '')
    """
    if dtype == "auto" and device.type == "cuda":
        has_bf16 = hardware.computes_bf16(device)
        chosen = (
            "bf16, in which this GPU computes" if has_bf16 else "fp16, as this GPU does not compute in bf16"
        )
        return f"{chosen} (dtype: auto)"
    if dtype == "auto":
        return f"fp32, as on every {device.type.upper()} (dtype: auto)"
    if dtype == "bf16" and device.type == "cpu" and not hardware.computes_bf16(device):
        return "bf16 as asked for, without instructions of this processor: many times slower than dtype: fp32"
    return ""


@functools.cache
def _say_once(line: str) -> None:
    """In the whole process: a recipe loads its base for each of its stages."""
    rank_zero_info(line)


def without_dropout(config: Any) -> Any:
    """Sets every dropout rate of a ``transformers`` config to 0, and returns the config.

    In BERT, where these are 0.1, a training step takes a quarter less time.
    """
    for name, value in vars(config).items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    return config


def _train_after_validation(network: nn.Module) -> None:
    """Keeps bitsandbytes from packing NF4 weights anew in evaluation, on CPUs with AVX512-BF16.

    Its kernel for that form gives no gradient to the layers below, and a module is trained again after a validation.
    """
    from bitsandbytes.nn import Linear4bit

    for layer in network.modules():
        if isinstance(layer, Linear4bit):
            layer.support_avx512bf16_for_cpu = False


def _quantization(base: str, dtype: torch.dtype, device: torch.device, has_new_head: bool) -> dict[str, Any]:
    if base == "plain":
        return {}
    from transformers import BitsAndBytesConfig

    skipped = list(HEADS) if has_new_head else None
    if base == "int8":
        quiet_int8()
        settings = BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=skipped)
    else:
        settings = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=dtype,
            llm_int8_skip_modules=skipped,
        )
    return {"quantization_config": settings, "device_map": {"": device}}


def fingerprint(network: nn.Module, skip: list[str]) -> str:
    """Sixteen hex digits that tell one base from another: names, and up to 64 values of each unquantized weight.

    The values are compared as bf16, so that a base loaded in bf16 and the same in fp32 are the same; quantized weights
    count by their name alone, because devices may round them differently.

    Args:
        network: a base without adapters.
        skip: parameters that are left out, because they are new.

    Example:
        >>> one, other = nn.Linear(2, 2), nn.Linear(2, 2)
        >>> fingerprint(one, []) == fingerprint(one, []), fingerprint(one, []) == fingerprint(other, [])
        (True, False)
    """
    digest = hashlib.blake2b(digest_size=8)
    for name, weight in network.named_parameters():
        if name in skip:
            continue
        digest.update(name.encode())
        if weight.is_floating_point():
            values = weight.detach().flatten()[:: max(1, weight.numel() // 64)][:64]
            digest.update(values.to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


@contextmanager
def _clear_load_errors(model: str) -> Iterator[None]:
    """One line for what goes wrong inside ``transformers``, which reports it over many."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise OSError(f"model={model!r} cannot be loaded: {reason}") from None


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No progress bars and no report of a new head; what matters of it is checked by :func:`load_base`."""
    from transformers.utils import logging as messages

    level, has_bars = messages.get_verbosity(), messages.is_progress_bar_enabled()
    messages.set_verbosity_error()
    messages.disable_progress_bar()
    try:
        yield
    finally:
        messages.set_verbosity(level)
        if has_bars:
            messages.enable_progress_bar()
