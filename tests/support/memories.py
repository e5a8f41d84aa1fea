"""Small helpers around the clients' memories."""

import io

import torch

from fedlight import FederatedLoop
from fedlight.callbacks.loop.parts.buffers import AveragedBuffers, LocalBuffers
from fedlight.federation.client_state import ClientMemories

POLICIES = {"average": AveragedBuffers, "local": LocalBuffers}


def kept(policy):
    """The part of a policy for buffers; none for ``refuse``."""
    return [POLICIES[policy]()] if policy in POLICIES else []


def loop_with(*, memory=None, **settings):
    """A loop with a store of memories of its own."""
    loop = FederatedLoop(**settings)
    loop.memory = memory or loop.memory
    return loop


def disk(folder, recent=None):
    """As in a run that trains; one that keeps the versions of the ``recent`` rounds alone has no other checkpoints."""
    memories = ClientMemories(limit_mib=0)
    if recent is not None:
        memories.recent, memories._has_checkpoint = recent, lambda round_idx: False
    memories.open(str(folder))
    return memories


def saved(memories, round_idx, path="memory://checkpoint"):
    """The state in a checkpoint that is written; nobody can look whether it lies at an address."""
    state = memories.state_dict(round_idx)
    with memories.being_saved(state, path):
        if "://" not in str(path):
            torch.save(state, path)
    return state


def files(folder):
    """The versions in a folder, without the notes of what is not saved yet."""
    return sorted(path.name for path in folder.glob("*.pt"))


def through_a_file(state):
    """What a checkpoint gives back."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)


def values(memories, *clients):
    return [memories.load(client).get("w", torch.tensor([-1.0])).item() for client in clients]


def w(value):
    return {"w": torch.tensor([float(value)])}
