"""Frozen base under an adapter: finding and loading a model and its tokenizer.

A base is plain (fp32, bf16 or fp16), int8 (T. Dettmers et al., "LLM.int8()", NeurIPS 2022,
https://arxiv.org/abs/2208.07339) or NF4 (T. Dettmers et al., "QLoRA", NeurIPS 2023, https://arxiv.org/abs/2305.14314),
the last two through bitsandbytes. Only safetensors files are read.
"""

import copy
import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from fedlight.devices import hardware
from fedlight.devices.measure.number_type import DTYPES, NumberType
from fedlight.devices.quantization import HEADS, loaded_bits, quiet_int8
from fedlight.pretrained import hub
from fedlight.pretrained.hub import find_model, hub_asked_once, shorten_load_errors
from fedlight.support.checks import Settings
from fedlight.support.console import silence_transformers
from fedlight.support.seeding import own_stream

BASES = ("plain", "int8", "nf4")
PIECE = 2**23
"""Numbers of a tensor that are read at a time."""
_LOGGED_AS = {"plain": "base", "int8": "int8 base with the rest", "nf4": "nf4 base, computed"}


@dataclass(frozen=True)
class Execution(Settings):
    """How a language model is executed: its costs, not its results.

    Args:
        trust_remote_code: run code that comes with the model.
        gradient_checkpointing: compute activations twice instead of keeping them: less memory, about a third more time.
        prefix: ``auto``: texts of a batch that begin alike share a row where that saves time; ``off``: a row per text.

    Raises:
        ValueError: a setting is of another type.
    """

    trust_remote_code: bool = False
    gradient_checkpointing: bool = False
    prefix: str = "auto"


def load_base(
    model: str,
    *,
    base: str,
    dtype: str,
    trust_remote_code: bool,
    num_labels: int | None = None,
    seed: int = 0,
) -> tuple[Any, list[str]]:
    """Load a base model without dropout: it is frozen, and ``lora.dropout`` is the dropout of training.

    A quantized base, or one in another number type than its files, is read tensor by tensor: at no time is there a copy of
    it beside it. A plain base in the type of its files is a map of them, which processes share.

    Arguments are those of a `LanguageModule`, with ``dtype`` settled by `fedlight.devices.measure.number_type.choose_dtype`.
    ``num_labels`` are outputs of an encoder's classification head, None for a causal language model; ``seed`` is that of
    weights that the folder does not have (a new head). Returned are the ``transformers`` model and the names of these.

    Raises:
        OSError: the model does not exist, or the hub cannot be reached.
        ValueError: the folder lacks weights other than those of a classification head, has weights of other sizes than its
            config, or has no layer to quantize.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    where, device = find_model(model), torch.get_default_device()
    loader = AutoModelForCausalLM if num_labels is None else AutoModelForSequenceClassification
    config = read_config(model, trust_remote_code, num_labels)
    number_type = DTYPES[dtype]
    as_in_files = base == "plain" and config.dtype == number_type
    with (
        nullcontext() if as_in_files else _tensor_by_tensor(),
        shorten_load_errors(model),
        hub_asked_once(where),
        silence_transformers(),
        own_stream(seed),
    ):
        network, report = loader.from_pretrained(
            where,
            config=config,
            dtype=number_type,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # refused below, by name
            output_loading_info=True,
            trust_remote_code=trust_remote_code,
            **_quantization_options(base, number_type, device, num_labels is not None),
        )
    if unlike := report["mismatched_keys"]:
        name, saved, here = min(unlike)
        raise ValueError(
            f"model={model!r}: {name} is {tuple(saved)} in its files, and {tuple(here)} is needed: use a folder whose "
            "config.json and weights are of one save_pretrained, or another model"
        )
    if base == "nf4":
        _disable_cpu_packing(network)
    if base == "int8":
        _move_int8_as_a_whole(network)
    if base != "plain" and loaded_bits(network) == 16:
        raise ValueError(
            f"base={base!r} quantizes nn.Linear layers, and {config.model_type} has none: set base to 'plain'"
        )
    new = sorted(report["missing_keys"])
    if new and device.type not in ("cpu", "meta"):
        _draw_on_cpu(network, new, seed)
    if num_labels is None and new:  # a classifier's head may be new
        raise ValueError(f"model={model!r} lacks weights of a causal language model: {', '.join(new[:3])}")
    return network, new


@torch.no_grad()
def _draw_on_cpu(network: Any, names: list[str], seed: int) -> None:
    """Replace new weights by those that a machine without a GPU draws."""
    with own_stream(seed), torch.device("cpu"):
        for owner, part in network.named_modules():
            new = [key for key, _ in part.named_parameters(owner, recurse=False) if key in names]
            if new:
                drawn = copy.deepcopy(part).cpu()
                network._init_weights(drawn)
                for key in new:
                    network.get_parameter(key).copy_(drawn.get_parameter(key.rpartition(".")[2]))


def read_config(model: str, trust_remote_code: bool = False, num_labels: int | None = None) -> Any:
    """Return the ``transformers`` config of a model with every dropout rate 0; see `load_base`.

    Raises:
        OSError: the model does not exist, or the hub cannot be reached.
        ValueError: it is an encoder with a decoder.
    """
    from transformers import AutoConfig

    where, labels = find_model(model), {} if num_labels is None else {"num_labels": num_labels}
    with shorten_load_errors(model), hub_asked_once(where), silence_transformers():
        config = AutoConfig.from_pretrained(where, trust_remote_code=trust_remote_code, **labels)
    # Of BART, transformers would take the decoder alone, whose positions count padding.
    if config.is_encoder_decoder or hasattr(config, "decoder_layers"):
        raise ValueError(
            f"model={model!r}: {config.model_type} is an encoder with a decoder: use a causal language model"
        )
    if num_labels is not None:
        # The cache is for generating text; with gradient checkpointing transformers warns of it.
        config.use_cache = False
    inner = [value for value in vars(config).values() if hasattr(value, "to_dict")]  # as of the text in Emu3
    for part in (config, *inner):
        for name, value in vars(part).items():
            if "drop" in name and isinstance(value, float):
                # In BERT, where rates are 0.1, a training step takes a quarter less time.
                setattr(part, name, 0.0)
    return config


def width_of(config: Any) -> int:
    """Return the width of a model's hidden states, of its text part where it has several."""
    return config.get_text_config().hidden_size


def load_tokenizer(model: str, trust_remote_code: bool = False) -> Any:
    """Return the tokenizer of a model; without a padding token it pads with its end token.

    Raises:
        OSError: the model does not exist, or the hub cannot be reached.
        ValueError: the tokenizer has neither padding nor end token.
    """
    find_model(model)
    with silence_transformers():
        tokenizer = hub.load_tokenizer(model, "model", trust_remote_code, fast=False)
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ValueError(
                f"tokenizer of model={model!r} has neither pad_token nor eos_token: set one of them"
            )
        tokenizer.pad_token = tokenizer.eos_token  # padding is masked
    return tokenizer


def log_number_type(base: str, chosen: NumberType) -> None:
    """Log a base's number type and its reason, unless the settings name a type that is not slow."""
    if chosen.reason:
        log_once(f"{_LOGGED_AS[base]} in {chosen.name}, {chosen.reason}")


# In the whole process: a recipe loads its base for each of its stages.
log_once = functools.cache(rank_zero_info)


def _disable_cpu_packing(network: nn.Module) -> None:
    """Keep bitsandbytes from packing NF4 weights in evaluation on CPUs with AVX512-BF16."""
    from bitsandbytes.nn import Linear4bit

    for layer in network.modules():
        if isinstance(layer, Linear4bit):
            # Its kernel for packed weights gives no gradient to lower layers; training goes on after validation.
            layer.support_avx512bf16_for_cpu = False


def _move_int8_as_a_whole(network: nn.Module) -> None:
    """Let int8 layers follow a module that is moved, as by a Trainer before and after it trains on a GPU."""
    from bitsandbytes.nn import Linear8bitLt

    class Int8Layer(Linear8bitLt):
        def _apply(self, *args: Any, **kwargs: Any) -> Any:
            # bitsandbytes moves its references when the layer's own `to` is called, not when a module around it moves.
            super()._apply(*args, **kwargs)
            for held in (self.weight, self.state):
                if held.CB is not None:
                    held.CB, held.SCB = self.weight.data, held.SCB.to(self.weight.device)
            return self

    for layer in network.modules():
        if isinstance(layer, Linear8bitLt):
            layer.__class__ = Int8Layer


def _quantization_options(
    base: str, dtype: torch.dtype, device: torch.device, has_new_head: bool
) -> dict[str, Any]:
    if base == "plain":
        return {}
    from transformers import BitsAndBytesConfig

    skipped = list(HEADS) if has_new_head else None  # a new head is trained, so not rounded
    if base == "int8":
        quiet_int8()
        options: dict[str, Any] = {"load_in_8bit": True}
    else:
        options = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": dtype}
    settings = BitsAndBytesConfig(**options, llm_int8_skip_modules=skipped)
    return {"quantization_config": settings, "device_map": {"": device}}


@contextmanager
def _tensor_by_tensor() -> Iterator[None]:
    """Let ``transformers`` read safetensors files tensor by tensor, each into separate memory.

    A bf16 file of 0.5 B parameters took 2.3 GiB as int8 and 3.4 GiB as NF4 for fp32 products; read so it takes 1.2 and 1.3
    GiB, imports included (0.5 GiB).
    """
    from transformers import modeling_utils

    # No argument of `from_pretrained` does it: `disable_mmap` reads whole files, `state_dict` takes no folder beside it.
    mapped = modeling_utils.safe_open
    modeling_utils.safe_open = lambda *args, **options: _File(lambda: mapped(*args, **options))
    try:
        yield
    finally:
        modeling_utils.safe_open = mapped
        # The C library keeps freed tensors of up to 32 MiB, between the small ones that stay.
        hardware.return_freed_memory()


class _File:
    """Safetensors file that ``open_map``, as ``safetensors.safe_open`` does, maps anew for each tensor."""

    def __init__(self, open_map: Any) -> None:
        self._open_map = open_map
        self._handle = open_map()  # for names and shapes: pages that are not read take no memory
        self._freed = hardware.FreedMemory()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)

    def __enter__(self) -> "_File":
        self._handle.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._handle.__exit__(*error)

    def get_slice(self, name: str) -> "_Weight":
        """Return a tensor that is read when it is indexed."""
        return _Weight(self, name)

    def read(self, name: str, index: Any) -> Tensor:
        """Return a copy of a tensor's part."""
        rows, *others = self._handle.get_slice(name).get_shape() or [1]
        step = max(1, PIECE // max(1, math.prod(others)))
        if index is ... and rows > step:  # the file's pages of a large embedding would lie beside its copy
            first = self._copy(name, slice(step))
            weight = first.new_empty(rows, *others)
            weight[:step] = first
            for start in range(step, rows, step):
                weight[start : start + step] = self._copy(name, slice(start, start + step))
        else:
            weight = self._copy(name, index)
        self._freed.add(weight.numel())
        return weight

    def _copy(self, name: str, index: Any) -> Tensor:
        # Pages of one map of the file would stay as long as a tensor, such as the embedding, is a view of it.
        with self._open_map() as handle:
            return handle.get_slice(name)[index].clone()


class _Weight:
    """Tensor of a file that is not read yet."""

    def __init__(self, file: _File, name: str) -> None:
        self._file, self._name = file, name
        self._slice = file._handle.get_slice(name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._slice, name)

    def __getitem__(self, index: Any) -> Tensor:
        return self._file.read(self._name, index)
