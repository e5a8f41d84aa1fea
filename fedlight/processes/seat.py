"""Processes that train one client together: each has a part of the frozen weights, and computes a part of each batch.

Repeated layers, the modules of an ``nn.ModuleList``, are split by torch's ``fully_shard`` (FSDP2): a layer's frozen weights
are put together while it computes, and freed after it. Trained weights, such as LoRA adapters, embeddings and heads stay
whole in each process, so messages, aggregation and checkpoints are as ever.
"""

import warnings
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch import Tensor, distributed, nn

from fedlight.support.pokes import never_sync_metrics

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def take_seat(store: Any, rank: int, per_client: int, device: str, wait: timedelta) -> None:
    """Make the processes of a client torch's default group, which exchanges layers and gradients.

    Args:
        store: store of all processes.
        rank: number of this process among all.
        per_client: processes that train a client together.
        device: type of their devices.
        wait: longest wait for another process in a step.

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


def split_layers(module: nn.Module) -> int:
    """Split the frozen weights of repeated layers among the processes of the default group, and return their number.

    Layers that are split already stay as they are.

    Raises:
        ValueError: a weight is quantized.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    layers = [
        layer for layer in repeated_layers(module) if any(not p.requires_grad for p in layer.parameters())
    ]
    for name, weight in ((n, p) for layer in layers for n, p in layer.named_parameters()):
        if not weight.requires_grad and not weight.is_floating_point():
            raise ValueError(
                f"{name} is quantized ({str(weight.dtype).removeprefix('torch.')}), and torch cannot split it: load the "
                "base without quantization, or set trainer.strategy.processes_per_client=1"
            )
    mesh: DeviceMesh | None = None
    for layer in layers:
        if not isinstance(layer, FSDPModule):
            mesh = mesh or init_device_mesh(_device_type(), (distributed.get_world_size(),))
            stay = {
                p for p in layer.parameters() if p.requires_grad or not p.dim()
            }  # trained ones, single numbers
            fully_shard(layer, mesh=mesh, reshard_after_forward=True, ignored_params=stay)
    return len(layers)


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


def whole(value: Any) -> Any:
    """Return a split tensor as a whole, on the CPU, else the value itself; all processes of the client call it."""
    return value.full_tensor().cpu() if hasattr(value, "full_tensor") else value


def split_as(state: Mapping[str, Any], held: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return whole tensors as parts where the tensor held under that name is split."""
    parts: dict[str, Any] = {}
    for name, value in state.items():
        mate: Any = held.get(name)
        parts[name] = value
        if hasattr(mate, "full_tensor"):
            from torch.distributed.tensor import distribute_tensor

            parts[name] = distribute_tensor(value.to(mate.device), mate.device_mesh, mate.placements)
    return parts


def add_up(tensor: Tensor) -> None:
    """Add up a tensor over the processes of the client, in place."""
    distributed.all_reduce(tensor)


def place() -> tuple[int, int]:
    """Return the number of this process among those of its client, from 0, and their number."""
    if not distributed.is_initialized():
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()
