"""Pairs of LoRA factors in a state, found by name, and states of a smaller or larger rank.

E. Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022, https://arxiv.org/abs/2106.09685: a layer's
weight W becomes ``W + s B A`` with A, ``(r, in)``, B, ``(out, r)``, and a scaling s, which no state holds: PEFT's is
``alpha / r``. PEFT names the factors of adapter NAME

    linear layer   LAYER.lora_A.NAME.weight, LAYER.lora_B.NAME.weight
    embedding      LAYER.lora_embedding_A.NAME, LAYER.lora_embedding_B.NAME

and leaves NAME out in saved files. An embedding's weight gains the transpose of its factors' product.

Only names, shapes and numbers of dimensions count, so meta tensors will do. Tensors that have such a name and are no pair of
matrices with one inner dimension are passed over, each with its reason. Where the module is given, so are pairs that hold
several experts (PEFT's ``target_parameters``), whose layer adds a product of each expert and not ``s B A``.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from fedlight.federation.client import State
from fedlight.federation.protocols import Federation, optimized_parameters

_FACTOR = re.compile(
    r"(?P<layer>(?:.+\.)?)lora_(?P<embedding>embedding_)?(?P<factor>[AB])"
    r"(?:\.(?!weight$|bias$)(?P<adapter>[^.]+))?(?P<weight>\.weight)?"  # saved files have no NAME
)
_PART = re.compile(r"(?:^|\.)lora_(?:embedding_)?([AB])(?:\.|$)")
_OTHER = re.compile(r"(?P<layer>(?:.+\.)?)lora_(?P<kind>[A-Za-z_]+?)(?:\.(?P<adapter>[^.]+))?(?:\.[^.]+)?")


@dataclass(frozen=True)
class LoraPair:
    """Names of the two factors of a LoRA adapter on one layer.

    Attributes:
        a: name of A, ``(r, in)``.
        b: name of B, ``(out, r)``.
        layer: dotted name of the layer.
        adapter: name of the adapter; empty where the names have none.
    """

    a: str
    b: str
    layer: str
    adapter: str

    def rank(self, state: Mapping[str, Tensor]) -> int:
        """Return the rank r that the pair has in a state."""
        return state[self.a].shape[0]

    def product(self, state: Mapping[str, Tensor], scaling: float = 1.0) -> Tensor:
        """Return ``scaling * B A``, ``(out, in)``, fp64: as large as the layer, so for small layers and tests."""
        return scaling * (state[self.b].double() @ state[self.a].double())


class LoraPairs(NamedTuple):
    """Pairs of a state in the order of their names, and the LoRA tensors that are in none: name -> the reason."""

    pairs: list[LoraPair]
    others: dict[str, str]


def factor_of(name: str) -> Literal["A", "B"] | None:
    """Return the factor that a tensor belongs to by its name; a bias of B belongs to B.

    Examples:
        >>> factor_of("q.lora_A.default.weight"), factor_of("table.lora_embedding_B.default"), factor_of("head.weight")
        ('A', 'B', None)
    """
    part = _PART.search(name)
    return None if part is None else "A" if part[1] == "A" else "B"


def find_pairs(state: Mapping[str, Tensor], module: nn.Module | None = None) -> LoraPairs:
    """Return the pairs of LoRA factors among tensors, whatever their order.

    Tensors that LoRA has nothing to do with, such as a trained head or a bias of B, are in neither part of the result.

    Args:
        state: tensors by name.
        module: module whose parameters have these names, where it is known.

    Examples:
        >>> a, b = torch.zeros(2, 5), torch.zeros(3, 2)
        >>> found = find_pairs({"q.lora_A.default.weight": a, "q.lora_B.default.weight": b, "head.weight": a})
        >>> [(pair.layer, pair.adapter, pair.a) for pair in found.pairs], found.others
        ([('q', 'default', 'q.lora_A.default.weight')], {})
        >>> find_pairs({"q.lora_A.default.weight": a}).others
        {'q.lora_A.default.weight': 'q has no lora_B of adapter default'}
    """
    factors: dict[tuple[str, str, str], dict[str, str]] = {}
    extras: dict[tuple[str, str], tuple[str, str]] = {}
    others: dict[str, str] = {}
    for name in sorted(state):
        if factor := _FACTOR.fullmatch(name):
            key = (factor["layer"].removesuffix("."), factor["adapter"] or "", factor["embedding"] or "")
            factors.setdefault(key, {})[factor["factor"]] = name
        elif (other := _OTHER.fullmatch(name)) and not name.endswith(".bias"):
            # As a DoRA's magnitude or AdaLoRA's singular values: with one, the layer does not add the plain product.
            layer = other["layer"].removesuffix(".")
            extras[layer, other["adapter"] or ""] = name, f"lora_{other['kind']}"
    pairs = []
    for (layer, adapter, embedding), names in sorted(factors.items()):
        shapes = {kind: state[name].shape for kind, name in names.items()}
        reason = _why_no_pair(layer, adapter, embedding, shapes)
        experts = 1 if module is None else getattr(module.get_submodule(layer), "num_experts", 1)
        if (layer, adapter) in extras:
            extra, kind = extras[layer, adapter]
            reason = f"{layer} has a {kind} beside its factors"
            others[extra] = f"{kind} is no factor of plain LoRA"
        if reason is None and experts > 1:
            reason = f"{layer} has the factors of several experts in one pair"
        if reason is None:
            pairs.append(LoraPair(names["A"], names["B"], layer, adapter))
        else:
            others |= dict.fromkeys(names.values(), reason)
    return LoraPairs(pairs, others)


def _why_no_pair(layer: str, adapter: str, embedding: str, shapes: Mapping[str, torch.Size]) -> str | None:
    """Return why factors of these shapes, by A and B, are no pair; None if they are one."""
    for kind in "AB":
        if kind not in shapes:
            of_adapter = f" of adapter {adapter}" if adapter else ""
            return f"{layer} has no lora_{embedding}{kind}{of_adapter}"
    a, b = shapes["A"], shapes["B"]
    if len(a) != 2 or len(b) != 2:
        return (
            f"{layer} has factors of {len(a)} and {len(b)} dimensions, as a convolution's, and not matrices"
        )
    if a[0] != b[1]:
        return f"{layer} has A of {tuple(a)} and B of {tuple(b)}, which cannot be multiplied"
    return None


def slice_to_rank(state: State, pairs: Sequence[LoraPair], rank: int) -> State:
    """Return a state with the first ``rank`` rows of each A and columns of each B; other tensors are those of ``state``.

    A pair of a smaller rank stays as it is. With the same scaling, the product of the slices is that of ``state`` with all
    other rows and columns 0.

    Raises:
        ValueError: ``rank`` is below 1.

    Examples:
        >>> state = {"q.lora_A.weight": torch.ones(3, 4), "q.lora_B.weight": torch.ones(2, 3)}
        >>> small = slice_to_rank(state, find_pairs(state).pairs, 1)
        >>> [tuple(value.shape) for value in small.values()]
        [(1, 4), (2, 1)]
    """
    if rank < 1:
        raise ValueError(f"rank={rank} of a LoRA adapter must be at least 1")
    cut = dict(state)
    for pair in pairs:
        cut[pair.a] = state[pair.a][:rank].contiguous()
        cut[pair.b] = state[pair.b][:, :rank].contiguous()  # safetensors refuses a strided view
    return cut


def pad_to(value: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a tensor with zeros behind its numbers, up to a shape that is nowhere smaller.

    A zero row of A together with its zero column of B leaves the product as it is, and has a gradient of exactly 0.

    Examples:
        >>> pad_to(torch.ones(1, 1), (1, 3)).tolist()
        [[1.0, 0.0, 0.0]]
    """
    more = [(0, large - small) for small, large in zip(value.shape, shape, strict=True)]
    return (
        pad(value, [number for ends in reversed(more) for number in ends]) if any(map(sum, more)) else value
    )


def trained_pairs(federation: Federation, algorithm: str) -> list[LoraPair]:
    """Return the pairs that a run trains.

    Raises:
        ValueError: it trains none, or LoRA tensors that are no plain pair, which ``algorithm`` cannot handle.
    """
    trained = optimized_parameters(federation)
    pairs, others = find_pairs(trained, federation.module)
    if others:
        name, reason = next(iter(others.items()))
        raise ValueError(
            f"algorithm={algorithm} is for plain LoRA on linear layers and embeddings, and {name} is trained: "
            f"{reason}. Leave such layers and variants out of the adapter, or take FedAvg"
        )
    if not pairs:
        raise ValueError(
            f"algorithm={algorithm} treats the factors A and B of LoRA adapters in unlike ways, and none of the "
            f"{len(trained)} trained parameters is one, such as {next(iter(trained))}: train an adapter, or take FedAvg"
        )
    return pairs
