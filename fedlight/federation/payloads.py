"""Prediction of the payloads of a round's visits, from names and shapes alone, before the round."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fedlight.federation.algorithm import Algorithm, message_to
from fedlight.federation.client import Client, State, Visit, Work
from fedlight.federation.lora.ranks import cut_to_rank, rank_of


@dataclass(frozen=True)
class Payloads:
    """Meta tensors of one visit, known before its round has started; what goes down or up is empty for nothing.

    ``memory`` is the client's after the visit.
    """

    down: State
    up: State
    start: State
    memory: dict[str, Any] = field(default_factory=dict)


def predict_payloads(
    algorithm: Algorithm,
    visits: Sequence[Visit],
    client: Client,
    state: State,
    gone_per_batch: float = 0.0,
    again: bool = False,
) -> list[Payloads]:
    """Return the payloads of a client's visits of one round, by asking ``send``, ``start_visit`` and ``reply``.

    Of the global state and the client's memory only names and shapes count. Forward-only visits have ``gone_per_batch``
    entries in ``Work.gone`` for each of their batches. With ``again`` the client remembers such visits of an earlier round.

    Raises:
        ValueError: a hook looks at the values of tensors.
    """
    client = replace(client, memory=_shapes(client.memory))  # a copy, which hooks may change
    state, rank = _shapes(state), rank_of(client)
    payloads: list[Payloads] = []
    try:
        for place, visit in enumerate([*visits, *visits] if again else visits):
            if place % len(visits) == 0:  # a round begins
                received, before = State(), None
            sent = message_to(algorithm, visit, client, state)
            received = received if sent is None else _shapes(sent)
            visiting = algorithm.start_visit(visit, client, received)
            visiting.before, visiting.shapes_only = before, True
            visiting.lora_rank = rank
            start: State = _shapes(visiting.start)
            gone = ((0, 1.0),) * round(visit.num_batches * gone_per_batch)  # their number counts
            sums = dict.fromkeys(start, 1.0)  # Scaffold divides by them
            work = Work(1, lr=1.0, mean_loss=1.0, seconds=0.0, lr_sums=sums, gone=gone)
            up = cut_to_rank(_shapes(algorithm.reply(visiting, start, work)), rank)
            down = {} if sent is None else cut_to_rank(received, rank)
            payloads.append(Payloads(down, up, start, _shapes(client.memory)))
            before = visiting
    except (RuntimeError, TypeError) as error:  # of torch, for an operation that needs values
        raise ValueError(
            f"how many bytes {type(algorithm).__name__} sends cannot be known before a round, as its send, start_visit or "
            f"reply looks at values of tensors ({error}): have these hooks depend on names and shapes alone"
        ) from error
    return payloads[-len(visits) :]


def _shapes(value: Any) -> Any:
    """Return ``value`` with meta tensors in the place of its tensors."""
    return tree_map_only(Tensor, lambda each: torch.empty(each.shape, dtype=each.dtype, device="meta"), value)
