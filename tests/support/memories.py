"""Small helpers around the clients' memories."""

import io

import torch

from fedlight.federation.client_state import ClientMemories


def disk(folder, **kwargs):
    """As in a run that trains."""
    memories = ClientMemories(limit_mib=0, **kwargs)
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
