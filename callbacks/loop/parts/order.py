"""Parts of a run in their order; a part that the settings do not need is neither made nor imported."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import lightning as L

from fedlight.callbacks.loop.parts.buffers import BufferPolicy
from fedlight.callbacks.loop.parts.optimizers import LossScale, StepSchedules, scaler_of
from fedlight.callbacks.loop.parts.part import Part
from fedlight.callbacks.loop.run import NoDevices, Run
from fedlight.devices.fleet import Fleet
from fedlight.federation.algorithm import Aggregation
from fedlight.federation.client import Channel, Identity
from fedlight.federation.forward.zeroth_order import ZerothOrder
from fedlight.processes.team import Team

if TYPE_CHECKING:
    from fedlight.callbacks.loop.forward.forward_visits import ForwardVisits
    from fedlight.callbacks.loop.groups.at_once import AtOnce
    from fedlight.callbacks.loop.parts.buffered import Buffered
    from fedlight.callbacks.loop.parts.privacy_account import PrivacyAccount


def privacy_part(
    aggregation: Aggregation | None, channel: Channel, parts: Sequence[Part]
) -> "PrivacyAccount | None":
    """Return the account of a private aggregation, channel or part."""
    if aggregation is None and type(channel) is Identity and not parts:
        return None
    from fedlight.callbacks.loop.parts.privacy_account import PrivacyAccount

    account = PrivacyAccount(aggregation, channel, parts)
    return account if account.is_private else None


def at_once_part(clients_at_once: int | Literal["auto"]) -> "AtOnce | None":
    """Return the trainer of several clients in one batch."""
    if clients_at_once == 1:
        return None
    from fedlight.callbacks.loop.groups.at_once import AtOnce

    return AtOnce(clients_at_once)


def forward_part(forward: ZerothOrder | None, *settings: Any) -> "ForwardVisits | None":
    """Return the trainer without gradients; ``settings`` are the further arguments of `ForwardVisits`."""
    if forward is None:
        return None
    from fedlight.callbacks.loop.forward.forward_visits import ForwardVisits

    return ForwardVisits(forward, *settings)


def buffered_part(fleet: Fleet | None, *settings: Any) -> "Buffered | None":
    """Return the part for buffered rounds; ``settings`` are the further arguments of `Buffered`."""
    if fleet is None or fleet.buffered is None:
        return None
    from fedlight.callbacks.loop.parts.buffered import Buffered

    return Buffered(fleet.buffered, *settings)


def emulated_devices(loop: Any, run: Run) -> NoDevices:
    """Return the emulated devices of a loop with a fleet."""
    from fedlight.callbacks.loop.devices import DeviceEmulation

    directions = 0 if loop.forward is None else loop.forward.perturbations
    return DeviceEmulation(loop.fleet, loop.clients_per_round, run, directions)


Kind = TypeVar("Kind", bound=Part)


def part_of_kind(kind: type[Kind], parts: Sequence[Part]) -> Kind:
    """Return the part of a kind among the given ones, or a new one with its default settings."""
    given = [part for part in parts if isinstance(part, kind)]
    if len(given) > 1:
        raise ValueError(
            f"parts has {' and '.join(type(part).__name__ for part in given)}: leave one of them out"
        )
    return given[0] if given else kind()


def parts_in_order(loop: Any, trainer: L.Trainer, team: Team) -> Iterator[Part]:
    """Yield the parts of a run; the order matters where a comment says so. ``loop`` is the `FederatedLoop`."""
    yield loop._optimizers  # before all that sets options of optimizers
    yield part_of_kind(StepSchedules, loop.parts)
    if scaler_of(trainer) is not None:  # precision 16-mixed
        yield LossScale()
    yield loop.buffers
    if loop._buffered is not None:
        yield loop._buffered
    if loop._at_once is not None:
        yield loop._at_once  # before the parts that look at a group
    if loop._forward is not None:
        yield loop._forward
    # Before the limits, which hold back updates.
    yield from (part for part in loop.parts if not isinstance(part, (StepSchedules, BufferPolicy)))
    yield loop._limits
    if loop.privacy is not None:
        yield loop.privacy
    if team.per_client > 1:
        from fedlight.callbacks.loop.ranks.split_steps import SplitSteps

        yield SplitSteps()
        if trainer.strategy.split_trained:  # type: ignore[attr-defined]
            from fedlight.callbacks.loop.ranks.split_weights import SplitWeights

            yield SplitWeights()
    if team.size > 1:
        from fedlight.callbacks.loop.ranks.ranks import Ranks

        yield Ranks(team, loop.memory, loop._federation)  # last: it exchanges the results of the others
