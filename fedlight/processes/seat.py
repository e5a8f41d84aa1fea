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
from torchmetrics import Metric

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

FOR_EVER = timedelta(days=30)
"""Wait for a process that is alive: others of the client wait while it writes files."""


def take_seat(store: Any, rank: int, per_client: int, device: str) -> None:
    """Make the processes of a client torch's default group, which exchanges layers and gradients.

    Args:
        store: store of all processes.
        rank: number of this process among all.
        per_client: processes that train a client together.
        device: type of their devices.

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
        timeout=FOR_EVER,
    )
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

    for part in module.modules():
        if isinstance(
            part, Metric
        ):  # each process sees all rows of an evaluation, and would count those of the others
            part.distributed_available_fn = lambda: False
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
            trained = {p for p in layer.parameters() if p.requires_grad}
            fully_shard(layer, mesh=mesh, reshard_after_forward=True, ignored_params=trained)
    return len(layers)


def _device_type() -> str:
    backend = distributed.get_backend_config()
    return "cuda" if "cuda" in backend and "nccl" in backend else "cpu"


def repeated_layers(module: nn.Module) -> list[nn.Module]:
    """Return the modules of the outermost lists of modules.

    Examples:
        >>> len(repeated_layers(nn.Sequential(nn.ModuleList([nn.Linear(1, 1), nn.ModuleList([nn.Linear(1, 1)])]))))
        2
    """
    if isinstance(module, nn.ModuleList):
        return [*module]
    return [layer for child in module.children() for layer in repeated_layers(child)]


def whole(value: Any) -> Any:
    """Return a split tensor as a whole, else the value itself; all processes of the client call it."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


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
