"""Processes that train one client together: each has a part of the frozen weights, and computes a part of each batch.

Repeated layers, the modules of an ``nn.ModuleList``, are split by torch's ``fully_shard`` (FSDP2): a layer's frozen weights
are put together while it computes, and freed after it. Trained weights, such as LoRA adapters, embeddings and heads stay
whole in each process, so messages, aggregation and checkpoints are as ever.

With ``split_trained`` a layer whose weights are all trained is split too. The module then holds such a weight as a
``DTensor``; optimizers and the federated loop hold its part in this process, `held_here`.
"""

import warnings
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn

from fedlight.support.pokes import never_sync_metrics

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def take_seat(store: Any, rank: int, per_client: int, device: str, wait: timedelta) -> None:
    """Make the processes of a client torch's default group, which exchanges layers and gradients.

    The ``rank`` is that among all processes, ``device`` the type of their devices, and ``wait`` the longest wait in a step.

    Raises:
        ValueError: there is a default group already.
    """
    if distributed.is_initialized():
        raise ValueError(
            "processes_per_client needs torch's default group of processes, which there is already: leave "
            "torch.distributed.init_process_group out"
        )
    prefixed: Any = distributed  # some builds of torch have no stores
    seat, place = divmod(rank, per_client)
    distributed.init_process_group(
        "gloo" if device == "cpu" else f"cpu:gloo,{device}:nccl",
        store=prefixed.PrefixStore(f"seat_{seat}", store),
        rank=place,
        world_size=per_client,
        timeout=wait,
    )
    never_sync_metrics()  # each process sees all rows of an evaluation, and would count those of the others
    # Lightning takes torch's default group for a sign that each process logs its own value.
    warnings.filterwarnings("ignore", "It is recommended to use `self.log\\(.*sync_dist=True")


def split_layers(module: nn.Module, trained: bool = False) -> int:
    """Split the frozen weights of repeated layers among the processes of the default group, and return their number.

    ``trained`` splits layers of trained weights alone too. Layers that are split already stay as they are.

    Raises:
        ValueError: a weight is quantized, or has a hook that a split weight would lose.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard, share_comm_ctx

    layers = [
        layer
        for layer in repeated_layers(module)
        if any(trained or not weight.requires_grad for weight in layer.parameters())
    ]
    for name, weight in ((n, p) for layer in layers for n, p in layer.named_parameters()):
        if not weight.requires_grad and not weight.is_floating_point():
            raise ValueError(
                f"{name} is quantized ({str(weight.dtype).removeprefix('torch.')}), and torch cannot split it: load the "
                "base without quantization, or set trainer.strategy.processes_per_client=1"
            )
    mesh: DeviceMesh | None = None
    uses = _uses(module)
    for layer in layers:
        if not isinstance(layer, FSDPModule):
            mesh = mesh or init_device_mesh(_device_type(), (distributed.get_world_size(),))
            weights = [*layer.parameters()]
            tuned = trained and all(weight.requires_grad for weight in weights)
            uses_here = _uses(layer)
            tied = {weight for weight in weights if uses_here[id(weight)] < uses[id(weight)]}
            # Those that are trained beside frozen ones, such as LoRA adapters, single numbers and tied ones stay whole.
            stay = {
                weight
                for weight in weights
                if not weight.dim() or (weight.requires_grad and (not tuned or weight in tied))
            }
            for name, weight in layer.named_parameters() if tuned else ():
                if weight not in stay and (weight._backward_hooks or weight._post_accumulate_grad_hooks):
                    raise ValueError(
                        f"a hook on the gradient of {name} in {type(layer).__name__} would never be called: take the hook "
                        "out, or set trainer.strategy.split_trained=false"
                    )
            split: Any = fully_shard(layer, mesh=mesh, reshard_after_forward=True, ignored_params=stay)
            split.set_gradient_divide_factor(1.0)  # each process has its share of the mean already
            split.set_force_sum_reduction_for_comms(True)  # gloo knows no other
            # Itself alone: the one before may be left out of this step, and would keep its gathered weights until later.
            split.set_modules_to_backward_prefetch([split])
    # Or each keeps its whole gradient.
    share_comm_ctx([layer for layer in layers if isinstance(layer, FSDPModule)])
    return len(layers)


def _uses(module: nn.Module) -> Counter[int]:
    """Return the numbers of modules that hold each parameter, by its identity."""
    return Counter(id(weight) for part in module.modules() for weight in part._parameters.values())


def _device_type() -> str:
    backend = distributed.get_backend_config()
    return "cuda" if "cuda" in backend and "nccl" in backend else "cpu"


def repeated_layers(module: nn.Module, listed: bool = False) -> list[nn.Module]:
    """Return the modules of the outermost lists of modules, ``listed`` in one; of lists and dicts among them their modules.

    Examples:
        >>> one, two = nn.Linear(1, 1), nn.ModuleList([nn.Linear(1, 1)])
        >>> repeated_layers(nn.Sequential(nn.ModuleList([one, two]))) == [one, *two]
        True
    """
    layers = []
    for child in module.children():
        if listed or isinstance(module, nn.ModuleList):
            is_container = isinstance(child, (nn.ModuleList, nn.ModuleDict))
            layers += repeated_layers(child, listed=True) if is_container else [child]
        else:
            layers += repeated_layers(child)
    return layers


def is_split(weight: Any) -> bool:
    """Return whether the processes of a client have a part each of a weight."""
    return hasattr(weight, "full_tensor")


def held_here(weight: Any) -> Any:
    """Return the part of a trained weight in this process, always the same parameter; a whole weight itself.

    Both have the same memory. The loop and the optimizers see the part alone.
    """
    if not is_split(weight) or not weight.requires_grad:
        return weight
    if not hasattr(weight, "held_here"):
        weight.held_here = nn.Parameter(weight.detach().to_local())
    return weight.held_here


def hold_parts(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer the parts of split weights in their place.

    Raises:
        ValueError: it moves a number by others than its own gradient and state.
    """
    kinds = [getattr(torch.optim, name) for name in ELEMENTWISE]
    for group in optimizer.param_groups:
        if any(map(is_split, group["params"])) and type(optimizer) not in kinds:
            raise ValueError(
                f"{type(optimizer).__name__} may look at whole weights, and trainer.strategy.split_trained gives it parts: "
                f"take one of {', '.join(ELEMENTWISE)}, or set trainer.strategy.split_trained=false"
            )
        for weight in filter(is_split, group["params"]):
            part = getattr(weight, "held_here", None)
            if part is not None and part.data_ptr() != weight.detach().to_local().data_ptr():
                del weight.held_here  # the module has been on another device since an earlier fit
        group["params"] = [*map(held_here, group["params"])]


ELEMENTWISE = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "Adamax")
"""Optimizers of torch that move each number by its own gradient and state alone."""


def whole(value: Any) -> Any:
    """Return a split tensor as a whole, on the CPU, else the value itself; all processes of the client call it."""
    return value.full_tensor().cpu() if is_split(value) else value


def split_as(state: Mapping[str, Any], held: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return whole tensors as parts where the tensor held under that name is split."""
    parts: dict[str, Any] = {}
    for name, value in state.items():
        mate: Any = held.get(name)
        parts[name] = value
        if is_split(mate):
            from torch.distributed.tensor import distribute_tensor

            parts[name] = distribute_tensor(value.to(mate.device), mate.device_mesh, mate.placements)
    return parts


def part_of(value: Tensor, mate: Any) -> Tensor:
    """Return the part in this process of a whole tensor, split as the weight ``mate``; a part itself."""
    from torch.distributed.tensor import distribute_tensor

    if value.shape != mate.shape:
        return value
    there = value.to(mate.device)
    part = distribute_tensor(there, mate.device_mesh, mate.placements, src_data_rank=None).to_local()
    return part.to(value.device)  # where the movements are


def put_together(part: Tensor, mate: Any) -> Tensor:
    """Return the whole of parts that are split as the weight ``mate``, on the CPU; all processes of the client call it."""
    from torch.distributed.tensor import DTensor

    here, mesh, stride = part.to(mate.device), mate.device_mesh, mate.stride()
    return whole(DTensor.from_local(here, mesh, mate.placements, shape=mate.shape, stride=stride))


def add_up(tensor: Tensor) -> None:
    """Add up a tensor over the processes of the client, in place."""
    distributed.all_reduce(tensor)


def place() -> tuple[int, int]:
    """Return the number of this process among those of its client, from 0, and their number."""
    if not distributed.is_initialized():
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()
