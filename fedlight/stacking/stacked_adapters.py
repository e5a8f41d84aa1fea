"""Adapters of several clients in one module, which trains or runs them in one batch.

The base is shared. Each trained parameter keeps its identity, so that optimizers, hooks and Lightning still hold it, and its
data take a leading dimension of clients; an elementwise optimizer then steps every client as if it were alone. Layers that
have such a parameter get another ``forward``, on their object alone, until `StackedAdapters.leave`.

Related: Z. Ye et al., "mLoRA", https://arxiv.org/abs/2312.02515, trains several adapters in one batch; L. Chen et al.,
"Punica: Multi-Tenant LoRA Serving", MLSys 2024, https://arxiv.org/abs/2310.18547, does so for inference.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from fedlight.federation.protocols import HoldsAdapters
from fedlight.stacking.dropout import DropoutMasks, SeededDropout
from fedlight.stacking.rows import Rows
from fedlight.stacking.stacked_layers import (
    REMEDY,
    StackedLinear,
    StackedLora,
    check_lora,
    refuse_mixing,
    refuse_replaced,
)
from fedlight.support.pokes import backward_pass

State = dict[str, Tensor]
_BEFORE_ADAPTER = ("lora_A", "lora_B", "modules_to_save")
_FIRST_OTHER = 1 << 20
"""Number of the first dropout layer that is not one of a LoRA adapter."""
_NEXT_CALL = 1 << 24
"""What is added to the number of such a layer where it is called again in the same step."""


class StackedAdapters:
    """Swaps the trained layers of a module for layers with a weight of each client, and back.

    Trained may be A and B of PEFT's LoRA on linear layers of a plain or NF4 base, and linear layers as a whole, such as a
    new head. Each client of a group may train another adapter of the module (FedBiscuit); all share the parameters of the
    first client's adapter for that time. ``parameters`` are those of every adapter, by the module's names.

    Raises:
        ValueError: something trained cannot be stacked, or a layer of the module mixes the examples of a batch.
    """

    def __init__(self, module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
        refuse_mixing(module)
        self.module, self._trained = module, dict(parameters)
        self._adapters = tuple(module.adapter_names) if isinstance(module, HoldsAdapters) else ()
        self._masks = DropoutMasks()
        self._calls: Counter[int] = Counter()
        self._loras: dict[str, Any] = {}
        self._linears: dict[str, nn.Linear] = {}
        for name in parameters:
            self._find_layer(name)
        self._stacked: dict[str, nn.Parameter] = {}
        self._alone: dict[str, Tensor] = {}
        self._names: list[dict[str, str]] = []
        self._layers: list[StackedLora | StackedLinear] = []
        self._swapped: list[nn.Module] = []

    def _find_layer(self, name: str) -> None:
        path, _, kind = name.rpartition(".")
        parts = path.split(".")
        if len(parts) > 2 and parts[-2] in ("lora_A", "lora_B"):
            path = ".".join(parts[:-2])
            self._loras[path] = self.module.get_submodule(path)
            check_lora(path, self._loras[path], parts[-1])
            return
        owner, embedding, _ = name.partition(".lora_embedding_")
        if embedding:
            check_lora(owner, self.module.get_submodule(owner), parts[-1])
        layer = self.module.get_submodule(path)
        if type(layer) is not nn.Linear:
            raise ValueError(
                f"{name} is trained, the {kind} of a layer of type {type(layer).__name__}: clients side by side can train "
                f"LoRA adapters and linear layers alone; {REMEDY}"
            )
        refuse_replaced(path, layer)
        self._linears[path] = layer

    @property
    def clients(self) -> int:
        """Number of clients that are stacked now, 0 outside of a group."""
        return len(self._names)

    def enter(self, starts: Sequence[Mapping[str, Tensor]], adapters: Sequence[str | None]) -> None:
        """Stack the parameters of a group of clients; gradients are None afterwards.

        ``starts`` has the start parameters of each client; one that is absent starts from the module's values. An adapter of
        None is the active one.

        Raises:
            ValueError: adapters of the group differ in rank, dropout or layers.
        """
        assert not self.clients, "leave comes before the next enter"
        chosen = [self._active() if adapter is None else adapter for adapter in adapters]
        host = chosen[0]
        hosts = [name for name in self._trained if adapter_of(name, self._adapters) in (None, host)]
        renamed = {
            adapter: {name: with_adapter(name, adapter, self._adapters) for name in hosts}
            for adapter in {*chosen}
        }
        self._check_alike([*renamed.values()], chosen)
        names = [renamed[adapter] for adapter in chosen]
        stacks = {}
        for name in hosts:
            values = [
                start.get(named[name], self._trained[named[name]])
                for start, named in zip(starts, names, strict=True)
            ]
            stacks[name] = _stacked(values, self._trained[name])
        self._names = names
        for name, stack in stacks.items():
            parameter = self._stacked[name] = self._trained[name]
            self._alone[name] = parameter.data
            _put(parameter, stack)
        self._swap(chosen)

    def set_rows(self, counts: Sequence[int], seeds: Sequence[int] | None) -> None:
        """Set the numbers of the clients' examples in the next batch, client after client.

        ``seeds`` are those of each client's dropout, in [0, 2**64); None draws them from torch's global stream.

        Raises:
            ValueError: these are not the clients of the group, or one has no example.
        """
        if len(counts) != self.clients or (seeds is not None and len(seeds) != self.clients):
            raise ValueError(
                f"counts={list(counts)} and seeds={seeds} are not of the group's {self.clients} clients"
            )
        rows = Rows(counts)
        for layer in self._layers:
            layer.rows = rows
        self._masks.set_rows(rows.counts, seeds)
        self._calls.clear()

    def hosts(self, k: int) -> dict[str, nn.Parameter]:
        """Return the stacked parameters that hold a client's, under the names of its adapter."""
        return {self._names[k][name]: parameter for name, parameter in self._stacked.items()}

    def parameters(self, k: int) -> State:
        """Return views of a client's parameters under the names of its adapter."""
        return {self._names[k][name]: parameter.data[k] for name, parameter in self._stacked.items()}

    def gradients(self, k: int) -> State:
        """Return views of a client's gradients under the names of its adapter, without those that are None."""
        return {
            self._names[k][name]: parameter.grad[k]
            for name, parameter in self._stacked.items()
            if parameter.grad is not None
        }

    def leave(self) -> list[State]:
        """Give the module its own parameters and forward passes back; gradients are None afterwards.

        Returns:
            The parameters of each client under the names of its adapter, fp32 on the CPU.
        """
        values = {name: p.data.to("cpu", torch.float32).unbind() for name, p in self._stacked.items()}
        trained = [
            {named[name]: value[k] for name, value in values.items()} for k, named in enumerate(self._names)
        ]
        for name, parameter in self._stacked.items():
            _put(parameter, self._alone[name])
        for layer in self._swapped:
            del layer.__dict__["forward"]
        self._masks.set_rows(None, None)
        self._stacked, self._alone, self._names, self._layers, self._swapped = {}, {}, [], [], []
        return trained

    # Adapters and layers

    def _active(self) -> str:
        active = {tuple(layer.active_adapters) for layer in self._loras.values()} or {
            (*self._adapters, "")[:1]
        }
        if len(active) > 1 or len(next(iter(active))) > 1:
            names = sorted({name for names in active for name in names})
            raise ValueError(
                f"adapters {', '.join(names)} are active at once: clients side by side train one each; {REMEDY}"
            )
        [[name]] = active
        return str(name)

    def _check_alike(self, names: Sequence[Mapping[str, str]], adapters: Sequence[str]) -> None:
        for named in names:
            for host, name in named.items():
                if name not in self._trained or self._trained[name].shape != self._trained[host].shape:
                    raise ValueError(
                        f"{host} has no counterpart of its shape named {name}: adapters of clients side by side need the "
                        f"same layers and ranks; {REMEDY}"
                    )
        for path, layer in self._loras.items():
            rates = {_rate(layer.lora_dropout[adapter]) for adapter in adapters if adapter in layer.lora_A}
            if len(rates) > 1:
                raise ValueError(
                    f"{path} drops {sorted(rates)} of the inputs of its adapters: clients side by side need one rate; "
                    f"{REMEDY}"
                )

    def _swap(self, adapters: Sequence[str]) -> None:
        host, self._ids = adapters[0], {id(parameter) for parameter in self._stacked.values()}
        for number, (path, layer) in enumerate(self._loras.items()):
            if host not in layer.lora_A:
                continue
            a, b = layer.lora_A[host].weight, layer.lora_B[host]
            bias = None if b.bias is None else self._per_client(b.bias)
            scalings = [float(layer.scaling[adapter]) for adapter in adapters]
            rate, drop = _rate(layer.lora_dropout[host]), None
            if rate > 0:
                layer_number = getattr(layer.lora_dropout[host], "number", number)  # as alone: the same masks
                drop = partial(self._masks.drop, rate=rate, number=layer_number)
            a, b = self._per_client(a), self._per_client(b.weight)
            stacked = StackedLora(layer, path, a, b, bias, scalings, drop)
            self._layers.append(stacked)
            self._set_forward(layer, stacked.forward)
        for path, linear in self._linears.items():
            # The wrapper of a trained head calls the module of the active adapter, whichever that is.
            weight = self._linears.get(with_adapter(path, host, self._adapters), linear)
            shift = None if weight.bias is None else self._per_client(weight.bias)
            head = StackedLinear(linear, path, self._per_client(weight.weight), shift)
            self._layers.append(head)
            self._set_forward(linear, head.forward)
        for number, (path, part) in enumerate(self.module.named_modules()):
            if type(part) is nn.Dropout and part.p > 0:
                self._set_forward(part, partial(self._drop_other, part, path, _FIRST_OTHER + number))

    def _per_client(self, weight: Tensor) -> Tensor:
        """Return a parameter as it is where it is stacked, and else expanded by clients."""
        return weight if id(weight) in self._ids else weight.expand(self.clients, *weight.shape)

    def _drop_other(self, layer: nn.Dropout, path: str, number: int, x: Tensor) -> Tensor:
        """Drop entries of an input; a layer that is called several times in a step has another mask each time."""
        if not layer.training:
            return x
        if backward_pass() < 0:  # no recomputation
            call = self._calls[number]
            self._calls[number] += 1
        elif self._calls[number] > 1:
            raise ValueError(
                f"{path} drops several times in a step, and activations are computed again in the backward pass, where "
                f"nothing tells which mask was whose: give each place an nn.Dropout of its own, or {REMEDY}"
            )
        else:
            call = 0
        return self._masks.drop(x, layer.p, number + call * _NEXT_CALL, shares=False)

    def _set_forward(self, layer: nn.Module, forward: Any) -> None:
        layer.__dict__["forward"] = forward
        self._swapped.append(layer)


def _stacked(values: Sequence[Tensor], like: Tensor) -> Tensor:
    if all(value is values[0] for value in values):  # mostly one tensor of the server
        every = values[0].detach().to(like).expand(len(values), *like.shape)
        return every.clone(memory_format=torch.contiguous_format)
    return torch.stack([value.detach().to(like) for value in values])


def _put(parameter: nn.Parameter, value: Tensor) -> None:
    """Give a parameter data of another shape, without a gradient."""
    parameter.grad = None
    # While an earlier loss is held, autograd keeps the node that adds up the gradients, with the old shape. Data of
    # another type make it forget the node.
    kind = torch.bfloat16 if value.dtype != torch.bfloat16 else torch.float32
    parameter.data = torch.empty(0, dtype=kind, device=value.device)
    parameter.data = value


def adapter_of(name: str, adapters: Collection[str] = ()) -> str | None:
    """Return the adapter in a parameter's name; None without one. Only PEFT's are recognized without their names.

    Examples:
        >>> adapter_of("model.q_proj.lora_A.default.weight"), adapter_of("model.head.weight")
        ('default', None)
        >>> adapter_of("heads.adapter1.body.weight", ["adapter0", "adapter1"])
        'adapter1'
    """
    parts = name.split(".")
    at = _place(parts, adapters)
    return None if at is None else parts[at]


def with_adapter(name: str, adapter: str, adapters: Collection[str] = ()) -> str:
    """Return the name of the same parameter, or layer, of another adapter; see `adapter_of`.

    Examples:
        >>> with_adapter("model.q_proj.lora_A.adapter0.weight", "adapter2"), with_adapter("head.weight", "adapter2")
        ('model.q_proj.lora_A.adapter2.weight', 'head.weight')
    """
    parts = name.split(".")
    at = _place(parts, adapters)
    return name if at is None else ".".join([*parts[:at], adapter, *parts[at + 1 :]])


def _place(parts: Sequence[str], adapters: Collection[str]) -> int | None:
    """Return the place of the adapter among the parts of a name."""
    after = (at + 1 for at, (kind, _) in enumerate(pairwise(parts)) if kind in _BEFORE_ADAPTER)
    known = (at for at, part in enumerate(parts) if part in adapters)
    return next(chain(after, known), None)


def _rate(dropout: nn.Module) -> float:
    if isinstance(dropout, SeededDropout):
        return dropout.rate
    return dropout.p if isinstance(dropout, nn.Dropout) else 0.0
