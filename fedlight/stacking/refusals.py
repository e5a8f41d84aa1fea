"""Refusals of modules that cannot train several clients in one batch, before work starts."""

from typing import Any

from torch import nn

REMEDY = "set clients_at_once to 1"
# Names of classes, so that neither peft nor bitsandbytes is imported.
_LORA_LAYERS = {
    "peft.tuners.lora.layer.Linear",
    "peft.tuners.lora.bnb.Linear4bit",
    "fedlight.stacking.fast_layers.FusedLora",
}
_BASES = {
    "torch.nn.modules.linear.Linear",
    "transformers.pytorch_utils.Conv1D",
    "bitsandbytes.nn.modules.Linear4bit",
}


def kind_of(layer: object) -> str:
    """Return module and name of an object's class.

    Examples:
        >>> kind_of(nn.Linear(1, 1))
        'torch.nn.modules.linear.Linear'
    """
    return f"{type(layer).__module__}.{type(layer).__qualname__}"


def check_lora(name: str, layer: Any, adapter: str) -> None:
    """Raise ValueError for a PEFT layer whose adapter cannot be stacked."""
    base = layer.base_layer
    if kind_of(layer) not in _LORA_LAYERS or kind_of(base) not in _BASES:
        raise ValueError(
            f"{name} is a LoRA adapter on a layer of type {type(base).__name__}: clients side by side can train adapters on "
            f"nn.Linear and NF4 layers alone; {REMEDY}"
        )
    if adapter in layer.lora_variant:
        variant = type(layer.lora_variant[adapter]).__name__.removesuffix("LinearVariant")
        raise ValueError(
            f"{name} has an adapter of the kind {variant}: clients side by side can train plain LoRA alone; {REMEDY}"
        )
    if layer.merged:
        raise ValueError(f"{name} has its adapter merged into its weights: call unmerge_adapter first")
    refuse_replaced(name, layer)


def refuse_replaced(name: str, layer: nn.Module) -> None:
    """Raise ValueError for a layer whose ``forward`` was replaced on the object, which stacking would undo."""
    if "forward" in vars(layer):
        raise ValueError(
            f"forward of {name} was replaced by other code, and stacking replaces it too; {REMEDY}"
        )


def refuse_mixing(module: nn.Module) -> None:
    """Raise ValueError for a module with layers whose result for one example depends on the rest of the batch."""
    for name, layer in module.named_modules():
        # The base of a device computes by a twin, which is in the layer's ``forward`` (fedlight.devices.quantization).
        computes = getattr(vars(layer).get("forward"), "twin", layer)
        if any(kind.__name__ == "Linear8bitLt" for kind in type(computes).__mro__):
            raise ValueError(
                f"{name} is an int8 layer (LLM.int8), which picks its outlier columns over all clients of a batch: use "
                f"model.base=nf4 or plain, or {REMEDY}"
            )
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            raise ValueError(
                f"{name} is batch normalization, whose statistics would be those of several clients; {REMEDY}"
            )
        dropout = isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0
        if dropout and type(layer) is not nn.Dropout:
            raise ValueError(
                f"{name} is a {type(layer).__name__}, which draws for several clients at once: use nn.Dropout, or {REMEDY}"
            )
