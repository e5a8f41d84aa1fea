"""State of the module outside its parameters: running statistics, power iterations, queues, averages of weights.

An optimizer does not hold it, so it would pass from one client of a round to the next. Buffers are compared by content
before and after a visit, which finds the buffers that training really changes: those of a batch norm in ``eval()`` are not
among them.

===================  ============================================================================================
none given           a buffer that training changes ends the run, by name
`AveragedBuffers`    every visit starts from the server's buffers, and after the round these are the mean over the
                     clients that took part, weighted by their examples, in fp64. The algorithm's weighting and the
                     server's optimizer do not apply: a variance stepped beyond its mean could become negative
`LocalBuffers`       FedBN: buffers, and weights and biases of the layers that own running statistics, stay with each
                     client in its memory and are not sent; the server's own stay as they were at the start
===================  ============================================================================================

FedBN: Li et al., "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021,
https://arxiv.org/abs/2102.07623, Algorithm 1. Deviation: other buffers that training changes stay with the client as well.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from fedlight.callbacks.loop.parts.part import Part
from fedlight.federation.algorithm import WeightedSum
from fedlight.federation.client import State, read, refuse_not_finite, serialized_bytes
from fedlight.federation.exact_sum import ExactSums

Buffers = dict[str, Tensor | None]
"""Dotted name -> buffer, of its own type and on its own device; None for a buffer that is declared but not made."""

WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def snapshot(module: nn.Module) -> Buffers:
    """Return a copy of all buffers, which later training cannot change; a shared buffer is copied once.

    Examples:
        >>> norm = nn.BatchNorm1d(2)
        >>> before = snapshot(norm)
        >>> _ = norm(torch.tensor([[0.0, 0.0], [2.0, 0.0]]))
        >>> changed(norm, before)
        ['running_mean', 'running_var', 'num_batches_tracked']
        >>> put_back(norm, before)
        >>> changed(norm, before)
        []
    """
    made: dict[int, Tensor] = {}
    values: Buffers = {}
    for name, _, _, value in _named(module):
        if value is not None and id(value) not in made:
            made[id(value)] = value.detach().clone()
        values[name] = None if value is None else made[id(value)]
    return values


def changed(module: nn.Module, before: Mapping[str, Tensor | None]) -> list[str]:
    """Return names of buffers that differ from a `snapshot`: in content, size or type, new or gone."""
    now = {name: value for name, _, _, value in _named(module)}
    return [
        name for name in {**before, **now} if name not in before or not _same(now.get(name), before[name])
    ]


def copies(module: nn.Module, names: Iterable[str]) -> Buffers:
    """Return a copy of these buffers as they are now; None for a removed one."""
    now = {name: value for name, _, _, value in _named(module)}
    present = {name: now.get(name) for name in names}
    return {name: None if value is None else value.detach().clone() for name, value in present.items()}


@torch.no_grad()
def put(module: nn.Module, values: Mapping[str, Tensor | None]) -> None:
    """Copy values into buffers by dotted name, in place where size and type allow it; other buffers stay."""
    for name, value in values.items():
        held, key = _holder(module, name)
        held_value = held.get(key)
        if (
            held_value is not None
            and value is not None
            and _alike(held_value, value)
            and not held_value.is_inference()  # torch refuses to change it in place
        ):
            held_value.copy_(value)
        else:
            near = held_value if held_value is not None else next(module.parameters(), value)
            held[key] = None if value is None or near is None else value.detach().to(near.device, copy=True)


def put_back(module: nn.Module, before: Mapping[str, Tensor | None]) -> None:
    """Restore all buffers of a `snapshot`, and remove new ones."""
    names = changed(module, before)
    put(module, {name: before[name] for name in names if name in before})
    for name in names:
        if name not in before:
            held, key = _holder(module, name)
            del held[key]


def persistent(module: nn.Module) -> list[str]:
    """Return the names of the buffers in the module's ``state_dict``."""
    return [name for name, part, key, _ in _named(module) if key not in part._non_persistent_buffers_set]


def normalization_parameters(module: nn.Module) -> frozenset[str]:
    """Return names of weights and biases of layers with own ``running_mean`` and ``running_var``, as batch norm.

    Examples:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.LayerNorm(2))
        >>> sorted(normalization_parameters(net))
        ['1.bias', '1.weight']
    """
    return frozenset(
        f"{prefix}.{name}" if prefix else name
        for prefix, part in module.named_modules()
        if all(part._buffers.get(key) is not None for key in ("running_mean", "running_var"))
        for name, _ in part.named_parameters(recurse=False)
    )


def named_parts(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the items of ``module.named_modules()``, in the same order and a quarter of the time.

    Examples:
        >>> net = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.Tanh()))
        >>> [name for name, _ in named_parts(net)]
        ['', '0', '1', '1.0']
    """
    waiting = [("", module)]
    seen: set[nn.Module] = set()
    while waiting:
        name, part = waiting.pop()
        if part in seen:
            continue
        seen.add(part)
        yield name, part
        if part._modules:  # most have none
            start = f"{name}." if name else ""
            waiting += [(start + key, sub) for key, sub in reversed(part._modules.items()) if sub is not None]


def _named(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor | None]]:
    """Yield dotted name, submodule, name in it, and buffer; meta tensors, which have no content, are left out."""
    for prefix, part in named_parts(module):
        for key, value in part._buffers.items():
            if value is None or not value.is_meta:
                yield f"{prefix}.{key}" if prefix else key, part, key, value


def _holder(module: nn.Module, name: str) -> tuple[dict[str, Tensor | None], str]:
    part, _, key = name.rpartition(".")
    return module.get_submodule(part)._buffers, key


def _alike(a: Tensor, b: Tensor) -> bool:
    return (a.shape, a.dtype, a.layout) == (b.shape, b.dtype, b.layout)


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    """Return whether two buffers are equal bit for bit."""
    if a is None or b is None:
        return a is b
    if not _alike(a, b) or a.device != b.device:
        return False
    if a.layout != torch.strided:
        a, b = a.to_sparse_coo().coalesce(), b.to_sparse_coo().coalesce()
        return _same(a.indices(), b.indices()) and _same(a.values(), b.values())
    flat = [value.detach().contiguous().reshape(-1) for value in (a, b)]
    # Compare as few numbers as possible: a causal mask of an old model has a million booleans in each layer.
    bytes_of = [n * each.element_size() for each in flat for n in (each.numel(), each.storage_offset())]
    # Torch views words only where sizes and offsets are multiples of them.
    width = next(size for size in WORDS if not any(number % size for number in bytes_of))
    # By bits: a constant may hold a NaN, which equals no NaN.
    return torch.equal(*(each.view(WORDS[width]) for each in flat))


VALUES = 32
"""Number of compared values of a large parameter, evenly spread."""
WHOLE = 2**16
"""Largest parameter that is compared whole: a batch moves a few rows of a code book."""


class FrozenParameters:
    """Check that training does not change parameters that no optimizer holds; ``federated`` are those that optimizers hold.

    Examples:
        >>> layer = nn.Linear(2, 2)
        >>> frozen = FrozenParameters(layer, {"weight": layer.weight})
        >>> _ = layer.bias.data.add_(1)
        >>> frozen.refuse_moved()
        Traceback (most recent call last):
        ValueError: training changes bias: parameters that no optimizer holds, so what one client makes of them ...
    """

    def __init__(self, module: nn.Module, federated: Mapping[str, Tensor]) -> None:
        self._parameters = {
            name: p for name, p in module.named_parameters() if name not in federated and not p.is_meta
        }
        self._before = {name: _some(p) for name, p in self._parameters.items()}

    def refuse_moved(self) -> None:
        """Raise ValueError if a parameter has changed."""
        moved = [
            name for name, p in self._parameters.items() if not torch.equal(_some(p), self._before[name])
        ]
        if moved:
            raise ValueError(
                f"training changes {_listed(moved)}: parameters that no optimizer holds, so what one client "
                "makes of them would pass to the next. Give them to the optimizer as well: it leaves what has no gradient "
                "alone, and they are then sent and averaged like the others"
            )


def _some(parameter: Tensor) -> Tensor:
    """Return a copy of the values of a small parameter, or of some of a large one."""
    part: Any = parameter.detach()
    if hasattr(part, "to_local"):  # split among the processes of a client
        part = part.to_local()
    values = part.reshape(-1)
    stride = max(1, len(values) // VALUES) if len(values) > WHOLE else 1
    return values[::stride].to(torch.float32, copy=True).nan_to_num_()  # a NaN equals nothing


Policy = Literal["refuse", "average", "local"]
LOCAL = "local_layers"
"""Key of a client's memory for the parameters and buffers that stay with it."""
MOST_NAMES = 6


@runtime_checkable
class LimitsBuffers(Protocol):
    """Algorithm under which some policies have no meaning; ``buffers``: names of those that have one."""

    buffers: tuple[str, ...]


class BufferPolicy(Part):
    """Policy that refuses buffers that training changes, and base of the other policies.

    Attributes:
        name: name of the policy in `LimitsBuffers`.
        round_start: name -> buffer before the first visit of the round under way, for a checkpoint that is written inside
            the round; empty outside of a round's visits.
        num_bytes: bytes of the buffers that are sent with the parameters, one way; always the same.
    """

    name: ClassVar[Policy] = "refuse"

    def __init__(self) -> None:
        self.round_start: Buffers = {}
        self.num_bytes = 0
        self._frozen: FrozenParameters | None = None
        self._looked = False

    def check(self, run: Any) -> None:
        fits = run.algorithm.buffers if isinstance(run.algorithm, LimitsBuffers) else (self.name,)
        if self.name not in fits:
            remedy = "take LocalBuffers" if LocalBuffers.name in fits else "leave it out of parts"
            raise ValueError(
                f"{type(self).__name__} has no meaning under {type(run.algorithm).__name__}: {remedy}"
            )

    def attach(self, run: Any) -> None:
        self._module: nn.Module = run.lightning_module
        self.round_start = {}
        self._frozen = None
        self._looked = False

    def shared(self, state: State) -> State:
        """Return the federated parameters that are sent and aggregated: here all."""
        return state

    def start_visit(self, memory: Mapping[str, Any], state: State, parameters: Mapping[str, Tensor]) -> State:
        """Put the client's initial buffers into the module, before a visit; return parameters of the client's own.

        ``state`` holds the server's federated parameters, ``parameters`` the module's.
        """
        if self._frozen is None:
            self.round_start = snapshot(self._module)
            self._frozen = FrozenParameters(self._module, parameters)
        return {}

    def after_batch(self, run: Any, group: Any) -> None:
        """Check buffers after the run's first batch, so that a run that cannot work ends at once."""
        if not self._looked:
            self._looked = True
            self._refuse(changed(self._module, self.round_start))
            self._refuse_moved()

    def trained(self) -> Buffers:
        """Return the present buffers that a visit has changed, before any other result of the visit is used.

        Raises ValueError for a buffer that the policy cannot handle, and Diverged for one that is no longer finite.
        """
        names = changed(self._module, self.round_start)
        if not names:
            return {}
        self._refuse(names)
        buffers = copies(self._module, names)
        # A buffer that was not finite before the visit says nothing about its training.
        refuse_not_finite(
            {n: v for n, v in buffers.items() if v is not None and self._was_finite(n)}, "buffer"
        )
        return buffers

    def _was_finite(self, name: str) -> bool:
        before = self.round_start.get(name)
        return before is None or bool(before.isfinite().all())

    def keep(self, memory: dict[str, Any], buffers: Buffers) -> None:
        """Save changed buffers that stay with the client in its memory."""

    def add(self, buffers: Buffers, num_examples: int) -> None:
        """Add the changed buffers of a client that took part in the round to those of the server."""

    def end_visit(self) -> None:
        """Restore the server's buffers after a visit; here nothing has changed them."""

    def abort(self, run: Any) -> None:
        self.restore()

    def restore(self) -> None:
        """Restore the server's buffers where a round was broken off."""
        if self.round_start:
            put_back(self._module, self.round_start)

    def close_round(self) -> None:
        """Put the server's new buffers into the module; raise ValueError if unoptimized parameters changed."""
        self._refuse_moved()
        self.round_start, self._frozen = {}, None

    def own_state(self, memory: Mapping[str, Any], state: State | None) -> State | None:
        """Return parameters and buffers of a client on its own, given its algorithm's ``state``; None: global ones."""
        return state

    def _refuse_moved(self) -> None:
        if self._frozen is not None:
            self._frozen.refuse_moved()

    def _refuse(self, names: list[str]) -> None:
        if names:
            raise ValueError(
                f"training changes {_listed(names)}: buffers, which no optimizer holds, so they would pass from one client "
                "to the next. Add AveragedBuffers (the mean over a round's clients) or LocalBuffers (they stay with each "
                "client, FedBN) to the loop's parts, or have these layers in eval() where they are not to learn"
            )


class AveragedBuffers(BufferPolicy):
    """Policy that averages buffers over the clients that took part in a round, weighted by their examples.

    Means of whole numbers (such as the number of batches that a batch norm has seen) and booleans are rounded to the
    nearest, a half to even. All buffers of the module's ``state_dict`` are sent with the parameters, changed or not. They
    form a safetensors file in their own types, which a lossy channel leaves unchanged.
    """

    name: ClassVar[Policy] = "average"

    def check(self, run: Any) -> None:
        super().check(run)
        if run.is_private:
            raise ValueError(
                "AveragedBuffers would send running statistics as they are, past the clipping and the noise of "
                "differential privacy: take LocalBuffers"
            )
        if run.aggregation is not None and not isinstance(run.aggregation, WeightedSum):
            raise ValueError(
                f"AveragedBuffers takes the mean of running statistics, which {type(run.aggregation).__name__} would "
                "not protect: take LocalBuffers"
            )
        if any(getattr(getattr(part, "limits", None), "enforce", None) for part in run.parts):
            raise ValueError(
                "limits.enforce holds for updates, not for the running statistics that AveragedBuffers takes the mean of: "
                "take LocalBuffers, or leave limits.enforce out"
            )

    def attach(self, run: Any) -> None:
        super().attach(run)
        self._travel = frozenset(persistent(self._module))
        sent = {
            name: torch.view_as_real(value) if value.is_complex() else value
            for name, value in self._module.named_buffers()
            if name in self._travel
        }
        self.num_bytes = serialized_bytes(sent)  # of all, to know it before the round
        self.sums = ExactSums()
        self._examples: dict[str, int] = {}
        self._all_examples = 0

    def start_visit(self, memory: Mapping[str, Any], state: State, parameters: Mapping[str, Tensor]) -> State:
        self.restore()  # once more: a callback behind the loop may have changed them after the visit
        return super().start_visit(memory, state, parameters)

    def end_visit(self) -> None:
        self.restore()

    def add(self, buffers: Buffers, num_examples: int) -> None:
        self._all_examples += num_examples
        self.sums.add({name: _real(value) for name, value in buffers.items()}, num_examples)
        for name in buffers:
            self._examples[name] = self._examples.get(name, 0) + num_examples

    def partial(self) -> dict[str, Any]:
        examples, all_examples = self._examples, self._all_examples
        self._examples, self._all_examples = {}, 0
        return {"sums": self.sums.partial(), "examples": examples, "all_examples": all_examples}

    def merge(self, partials: Sequence[Mapping[str, Any]]) -> None:
        for partial in partials:
            self.sums.merge(partial["sums"])
            self._all_examples += partial["all_examples"]
            for name, examples in partial["examples"].items():
                self._examples[name] = self._examples.get(name, 0) + examples

    def close_round(self) -> None:
        for name, examples in self._examples.items():
            # Clients whose visits have not changed the buffer have the server's.
            if others := self._all_examples - examples:
                self.sums.add({name: _real(self.round_start[name])}, others)
        means: Buffers = {}
        for name, total in self.sums.result().items():
            before = self.round_start[name]
            assert before is not None
            mean = total / self._all_examples
            if before.is_complex():
                mean = torch.view_as_complex(mean)
            whole = not (before.is_floating_point() or before.is_complex())
            means[name] = (mean.round() if whole else mean).to(before.dtype)
        self.restore()
        put(self._module, means)
        self._examples, self._all_examples = {}, 0
        super().close_round()

    def _refuse(self, names: list[str]) -> None:
        now = dict(self._module.named_buffers())
        for name in names:
            before, after = self.round_start.get(name), now.get(name)
            if before is None or after is None or before.shape != after.shape:
                sizes = [None if value is None else tuple(value.shape) for value in (before, after)]
                raise ValueError(
                    f"AveragedBuffers: training changes the size of {name} from {sizes[0]} to {sizes[1]}, so it "
                    "has no mean: take LocalBuffers"
                )
        if unsaved := [name for name in names if name not in self._travel]:
            raise ValueError(
                f"AveragedBuffers: training changes {_listed(unsaved)}, which the module's state_dict leaves out, "
                "so it is not sent: register it with persistent=True, or take LocalBuffers"
            )


class LocalBuffers(BufferPolicy):
    """Policy that keeps buffers, and parameters of the layers that own running statistics, with each client."""

    name: ClassVar[Policy] = "local"

    def attach(self, run: Any) -> None:
        super().attach(run)
        self._names = normalization_parameters(self._module)  # FedBN, Algorithm 1

    def shared(self, state: State) -> State:
        return {name: value for name, value in state.items() if name not in self._names}

    def start_visit(self, memory: Mapping[str, Any], state: State, parameters: Mapping[str, Tensor]) -> State:
        self.restore()
        super().start_visit(memory, state, parameters)
        self._parameters = {name: p for name, p in parameters.items() if name in self._names}
        kept = memory.get(LOCAL, {"parameters": {}, "buffers": {}})
        put(self._module, kept["buffers"])
        of_server = {name: state[name] for name in self._parameters}
        return of_server | {name: value for name, value in kept["parameters"].items() if name in of_server}

    def end_visit(self) -> None:
        self.restore()

    def trained(self) -> Buffers:
        refuse_not_finite(read(self._parameters), "trained")
        return super().trained()

    def keep(self, memory: dict[str, Any], buffers: Buffers) -> None:
        trained = read(self._parameters)  # as they are until ``leave``
        if trained or buffers:
            memory[LOCAL] = {"parameters": trained, "buffers": buffers}

    def own_state(self, memory: Mapping[str, Any], state: State | None) -> State | None:
        if LOCAL not in memory:
            return state
        kept = memory[LOCAL]
        buffers = {name: value for name, value in kept["buffers"].items() if value is not None}
        return {**(state or {}), **kept["parameters"], **buffers}

    def _refuse(self, names: list[str]) -> None:
        """Refuse nothing: every buffer stays with its client."""


def _real(value: Tensor | None) -> Tensor:
    """Return the buffer; for a complex one its real and imaginary parts (fp64) in a last dimension of size 2."""
    assert value is not None  # checked by trained()
    return torch.view_as_real(value.detach().to(torch.complex128)) if value.is_complex() else value.detach()


def _listed(names: list[str]) -> str:
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
