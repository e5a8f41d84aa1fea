"""LoRA adapters on a frozen base: new, from PEFT folders, or merged into the base. One of several is active at a time.

E. Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022, https://arxiv.org/abs/2106.09685:
``h = W x + (alpha / r) B A dropout(x)``. Trained weights are fp32 whatever the base's number type.
"""

import copy
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedlight.modules.language.adapter_folders import find_adapters
from fedlight.modules.language.base_model import log_once
from fedlight.support.checks import Settings, check_choice, check_range
from fedlight.support.seeding import derive_seed, own_stream


@dataclass(frozen=True)
class Lora(Settings):
    """Low-rank adapters and the layers that have them.

    Args:
        rank: r of the adapter.
        alpha: the adapter is scaled by ``alpha / rank``.
        dropout: in [0, 1), on the adapter's input; the base's own dropout is off.
        targets: ``all-linear``, a regular expression, or names of layers. The first takes all layers but the head; in some
            architectures also experts that share a tensor, which need ``dropout`` 0. Layers left out are logged.

    Raises:
        ValueError: a setting is out of range.
    """

    rank: int = 8
    alpha: float = 16
    dropout: float = 0.05
    targets: str | list[str] = "all-linear"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.targets:
            raise ValueError(
                f"lora.targets={self.targets!r} names no layer: take all-linear, or give names of layers"
            )
        check_range("lora.rank", self.rank, 1, float("inf"))
        check_range("lora.alpha", self.alpha, 0, float("inf"), above_low=True)  # at 0 nothing is trained
        if not 0 <= self.dropout < 1:  # nor at 1
            raise ValueError(f"lora.dropout={self.dropout} must be in [0, 1)")


def add_adapters(
    network: Any, names: Sequence[str], options: Any, task: str, new_weights: Sequence[str]
) -> Any:
    """Return a base with the adapters of a `LanguageModule`'s settings."""
    if options.adapter is not None and not options.merge_adapter:
        network = load_adapters(network, options.adapter, task, names)
        _refuse_changed_base(network, options.adapter)
        return network
    if options.merge_adapter:
        network = _merge(load_adapters(network, options.adapter, task)).requires_grad_(False)
    lora = get_lora_settings(options, task)
    return create_adapters(network, names, lora, new_weights, derive_seed(options.seed, "adapter"))


def get_lora_settings(options: Any, task: str) -> dict[str, Any]:
    """Return a module's settings as arguments of PEFT's ``LoraConfig``."""
    lora = options.lora
    scaled = {"r": lora["rank"], "lora_alpha": lora["alpha"], "lora_dropout": lora["dropout"]}
    return scaled | {"target_modules": lora["targets"], "task_type": task}


def create_adapters(
    network: Any, names: Sequence[str], lora: Mapping[str, Any], new_weights: Sequence[str], seed: int
) -> Any:
    """Add equal LoRA adapters to a base, the first one active; they change nothing until they are trained, as B is 0.

    ``lora`` has ``r``, ``lora_alpha``, ``lora_dropout``, ``task_type`` and ``target_modules`` of PEFT's ``LoraConfig``;
    targets are ``"all-linear"`` (every linear layer but the head), a regular expression, or names of layers. ``new_weights``
    are parameters of the base that no folder has: their modules are trained without LoRA and saved too. ``seed`` is that of
    A.

    Raises:
        ValueError: no layer has one of the names in ``target_modules``.
    """
    from peft import LoraConfig, TaskType, get_peft_model

    targets = lora["target_modules"]
    if not isinstance(targets, str):
        layers = sorted({name.rpartition(".")[2] for name, _ in network.named_modules()} - {""})
        for target in targets:
            check_choice("lora.targets", target.rpartition(".")[2], layers)
    whole = {name.rpartition(".")[0] for name in new_weights}

    # PEFT adds modules named classifier or score to this list itself.
    saved = [name for name in sorted(whole) if not {"classifier", "score"} & set(name.split("."))]
    config = LoraConfig(**{**lora, "task_type": TaskType(lora["task_type"])}, modules_to_save=saved)
    if targets == "all-linear":
        # PEFT trains each layer of a classifier whose name ends so as a whole, as pre_classifier of DistilBERT.
        heads = ("classifier", "score") if config.task_type == TaskType.SEQ_CLS else ()
        named = [name for name, _ in network.named_modules() if name.endswith(heads)]
        config.exclude_modules = [*_bypassed_layers(network), *named] or None

    # Drawn on the CPU, and so alike on every device; PEFT moves them to the layers.
    device = torch.device("meta" if network.device.type == "meta" else "cpu")
    with _filter_peft_warnings(), own_stream(seed), device:
        try:
            network = get_peft_model(network, config, adapter_name=names[0])
        except ValueError as error:
            if not isinstance(targets, str):
                raise
            mend = "; set lora.dropout to 0" if "lora_dropout" in str(error) else ""
            raise ValueError(f"lora.targets={targets!r} does not suit this model ({error}{mend})") from error
        # By now PEFT has found the layers; in a network with an adapter it would take more for "all-linear".
        for name in names[1:]:
            network.add_adapter(name, copy.deepcopy(network.peft_config[names[0]]))
    if targets == "all-linear":
        _log_bare_layers(network.get_base_model())
    weights = dict(network.named_parameters())
    with torch.no_grad():
        for parameter, weight in weights.items():
            if names[0] in parameter.split("."):
                for name in names[1:]:
                    weights[parameter.replace(f".{names[0]}", f".{name}")].copy_(weight)
    return _train_in_fp32(network)


def _bypassed_layers(network: Any) -> list[str]:
    """Return the linear layers that cannot use an adapter.

    Other code reads the weights of routers and of some projections of Mamba; layers of groups (DeepSeek V4) have another
    product; text does not pass the tower for images.
    """
    modules = dict(network.named_modules())
    mambas = [name for name, part in modules.items() if hasattr(part, "A_log") and hasattr(part, "D")]
    bypassed = [f"{name}.{layer}" for name in mambas for layer in ("dt_proj", "out_proj")]
    linear = {name: part for name, part in modules.items() if isinstance(part, nn.Linear)}
    bypassed += [name for name, part in linear.items() if re.search("Router|Grouped", type(part).__name__)]
    if network.config.get_text_config() is not network.config:
        reached = {*network.get_decoder().modules()}
        bypassed += [name for name, part in linear.items() if part not in reached]
    return bypassed


def _log_bare_layers(base: Any) -> None:
    """Log which linear layers besides the head are without an adapter; PEFT leaves some out where experts are fused."""
    head = base.get_output_embeddings()
    wrapped = {"base_layer", "lora_A", "lora_B", "original_module", "modules_to_save"}
    bare = {
        ".".join(name.split(".")[-2:])
        for name, part in base.named_modules()
        if isinstance(part, nn.Linear) and part is not head and not wrapped & {*name.split(".")}
    }
    if bare:
        log_once(f"lora.targets=all-linear: layers named {', '.join(sorted(bare))} are without an adapter")


def load_adapters(network: Any, folder: str, task: str, names: Sequence[str] = ("default",)) -> Any:
    """Add the adapters of a folder of `save_adapters` to a base, the first one active, to be trained further.

    The folder has one adapter, for all names, or as many as names; ``task`` is PEFT's name of their kind.

    Raises:
        FileNotFoundError: the folder has no adapter.
        ValueError: the adapter is of another kind, or for another base.
    """
    from peft import PeftConfig, PeftModel, load_peft_weights, set_peft_model_state_dict

    saved = find_adapters(folder)
    folders = saved * len(names) if len(saved) == 1 else saved
    for path in saved:
        config = PeftConfig.from_pretrained(path)
        if config.peft_type != "LORA" or config.task_type != task:
            kind = f"{config.peft_type.value} for {config.task_type}"
            raise ValueError(f"adapter={path!r} is {kind}; needed is LORA for {task}")
    (first, start), *others = zip(names, folders, strict=True)
    try:
        with _filter_peft_warnings():
            # PEFT would read the files to a GPU, wherever the base is.
            network = PeftModel.from_pretrained(network, start, first, is_trainable=True, torch_device="cpu")
            for name, path in others:
                if network.load_adapter(path, name, is_trainable=True, torch_device="cpu").missing_keys:
                    raise ValueError(f"{path!r} lacks weights")
    except (RuntimeError, ValueError, UserWarning) as error:  # of torch, PEFT and the filter
        what = " ".join(str(error).split())[:200]  # the first line of torch's alone says nothing
        raise ValueError(f"adapter={folder!r} does not fit this base: {what}") from None
    network = _train_in_fp32(network)
    for name, path in zip(names, folders, strict=True):
        # Once more in fp32: PEFT has rounded a head to the number type of the base.
        set_peft_model_state_dict(network, load_peft_weights(path, device="cpu"), adapter_name=name)
    return network


def _refuse_changed_base(network: Any, folder: str) -> None:
    """Raise ValueError for adapters of others that PEFT cannot switch off: the raw base would not be what it was."""
    for config in network.peft_config.values():
        drawn = config.init_lora_weights  # True, False or a name
        changes = {
            f"bias={config.bias}": config.bias != "none",
            f"init_lora_weights={drawn}": str(drawn).startswith(("pissa", "olora", "corda", "lora_ga")),
            "layer_replication": config.layer_replication is not None,
        }
        if any(changes.values()):
            setting = next(name for name, is_set in changes.items() if is_set)
            raise ValueError(
                f"adapter={folder!r} has PEFT's {setting}, which also changes the base, so the raw model could not be "
                "compared with it: set merge_adapter=true, or convert it to plain LoRA"
            )


def merge_copy(network: Any, base: str) -> Any:
    """Return a copy of the base with its adapter added to its weights.

    Raises:
        ValueError: the base is quantized, there are several adapters, or layers share a weight.
    """
    if base != "plain":
        raise ValueError(f"save_merged needs base='plain', not {base!r}, whose weights are rounded")
    if len(network.peft_config) > 1:
        raise ValueError(
            f"save_merged adds one adapter to the base, this module has {len(network.peft_config)}: save_adapter "
            "writes a folder of each, of which adapter= takes one"
        )
    merged = _merge(copy.deepcopy(network))
    for part in [*merged.modules()]:
        for name, layer in part.named_children():
            setattr(part, name, getattr(layer, "_orig_mod", layer))  # torch.compile changes names below it
    return merged


def _merge(network: Any) -> Any:
    users = Counter(id(weight) for part in network.modules() for weight in part.parameters(recurse=False))
    for name, part in network.get_base_model().named_modules():
        weights = part.get_base_layer().parameters() if hasattr(part, "lora_A") else ()
        if any(users[id(weight)] > 1 for weight in weights):
            raise ValueError(
                f"the adapter of {name} cannot be added to its weight, which another layer has: save the adapter, or leave "
                "the layer out of lora.targets"
            )
    return network.merge_and_unload()


def activate(network: Any, name: str) -> None:
    """Make one adapter the active one, the only one with gradients; raise ValueError where there is no such adapter."""
    check_choice("adapter", name, network.peft_config)
    _switch(network, _adapter_layers(network), name)
    for parameter, weight in trained_parameters(network).items():
        if name not in parameter.split("."):
            weight.grad = None  # a gradient of 0 would let momentum and decay move it


@contextmanager
def keep_active(network: Any) -> Iterator[Callable[[str], None]]:
    """Yield a function that activates an adapter; at the end activate the one that was active before."""
    layers, name = _adapter_layers(network), network.active_adapter
    try:
        yield lambda other: _switch(network, layers, other)
    finally:
        _switch(network, layers, name)


def _adapter_layers(network: nn.Module) -> list[Any]:
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    return [layer for layer in network.modules() if isinstance(layer, (BaseTunerLayer, ModulesToSaveWrapper))]


def _switch(network: Any, layers: Sequence[Any], name: str) -> None:
    """Activate an adapter as PEFT's ``set_adapter`` does, without freezing the others and in a tenth of the time."""
    for layer in layers:
        layer._active_adapter = name
    network.active_adapter = network.base_model.active_adapter = name


@contextmanager
def disable_adapters(network: Any, off: bool = True) -> Iterator[None]:
    """Run the body without the adapters, or, where ``off`` is false, without those that are zero and change nothing."""
    # PEFT's own context manager also collects the state of all layers, which takes 5 ms.
    layers = _adapter_layers(network) if off else _zero_layers(network)
    before = [layer._disable_adapters for layer in layers]
    try:
        for layer in layers:
            layer._disable_adapters = True
        yield
    finally:
        for layer, was in zip(layers, before, strict=True):
            layer._disable_adapters = was


def _zero_layers(network: nn.Module) -> list[Any]:
    """Return the LoRA layers whose only active adapter has B = 0, as before training."""
    layers = []
    for layer in _adapter_layers(network):
        names = layer.active_adapters if hasattr(layer, "lora_variant") else []
        if len(names) == 1 and names[0] in layer.lora_B and names[0] not in layer.lora_variant:
            b = layer.lora_B[names[0]]
            if b.bias is None:
                layers.append((layer, b.weight.count_nonzero()))
    # One transfer from the device for all layers.
    counts = torch.stack([count for _, count in layers]).tolist() if layers else []
    return [layer for (layer, _), count in zip(layers, counts, strict=True) if count == 0]


def trained_parameters(network: nn.Module) -> dict[str, nn.Parameter]:
    """Return all parameters that require a gradient, by name."""
    return {name: weight for name, weight in network.named_parameters() if weight.requires_grad}


def _train_in_fp32(network: Any) -> Any:
    for name, weight in network.named_parameters():
        if not network.peft_config.keys().isdisjoint(name.split(".")):
            weight.requires_grad_(True)  # PEFT freezes an adapter that is not the first
    for name, weight in trained_parameters(network).items():
        # In bf16 a step of 1e-5 is below half a unit in the last place of most entries: rounded away.
        weight.data = weight.data.float()
        if "lora_" not in name:  # PEFT casts the input of LoRA, not of modules that are trained without it
            network.get_submodule(name.rpartition(".")[0]).register_forward_pre_hook(_cast_input)
    return network.train()


def _cast_input(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    dtype = next(module.parameters()).dtype  # fp32, unless trainer.precision is 64-true
    return tuple(
        value.to(dtype) if value.is_floating_point() else value for value in inputs
    )  # tokens stay whole


@contextmanager
def _filter_peft_warnings() -> Iterator[None]:
    """Ignore warnings of PEFT that mean nothing here; turn the one about missing weights into an error."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        # PEFT sets it by itself. Patterns match parameters, those of experts.
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to False", UserWarning)
        warnings.filterwarnings("ignore", r"The following \w+_pattern keys did not match", RuntimeWarning)
        warnings.filterwarnings("error", "Found missing adapter keys", UserWarning)
        yield
