"""Refusals of secure aggregation: a run's server must be known to need no more than a sum."""

from collections.abc import Sequence
from typing import Any

from fedlight.callbacks.loop.parts.part import Part
from fedlight.callbacks.loop.parts.privacy_account import SUMS_ALONE
from fedlight.callbacks.loop.visits.visit import TakesUpload
from fedlight.federation.algorithm import WeightedSum
from fedlight.federation.channel import Wire
from fedlight.federation.client import Identity
from fedlight.federation.privacy import ClipAndNoise

LEAST_NODES = 3
"""Of two nodes, each would learn the other's sum from the total; so no sum of fewer is unmasked, whoever is lost."""


def shared_by(settings: dict[str, Any]) -> int:
    """Return the number of clients that share the noise of their sum."""
    return int(getattr(getattr(settings["channel"], "private", None), "shared_by", 1))


def refuse_shared_noise(settings: dict[str, Any], secure: bool) -> None:
    """Raise ValueError for noise that clients share where the server would see what each sends."""
    if shared_by(settings) > 1 and not secure:
        raise ValueError(
            f"federated.channel.up=ClipAndNoise with shared_by={shared_by(settings)} needs secure-aggregation, since one "
            "update has too little noise: set secure-aggregation to true, or leave shared_by out"
        )


def refuse_unsummable(settings: dict[str, Any], callbacks: Sequence[Any] = ()) -> None:
    """Raise ValueError for settings of the loop, or callbacks of the server, that need single uploads."""
    algorithm, aggregation, channel = (settings[name] for name in ("algorithm", "aggregation", "channel"))
    codecs = getattr(channel, "up_codecs", [])
    names = ", ".join(type(codec).__name__ for codec in codecs)
    parts = [part for part in settings["parts"] if type(part).aggregation is not Part.aggregation]
    takers = [type(callback).__name__ for callback in callbacks if isinstance(callback, TakesUpload)]
    refused = (
        (
            f"algorithm={type(algorithm).__name__}",
            type(algorithm) not in SUMS_ALONE,  # a derived class may do anything
            "its server needs more than one sum over all clients of a round, or is not known not to: take FedAvg or FedProx",
        ),
        (
            f"aggregation={type(aggregation).__name__}",
            type(aggregation) not in (type(None), WeightedSum),
            "it looks at single updates: leave it out; instead of PrivateMean, clients can clip and add noise themselves, "
            "with channel.up=ClipAndNoise",
        ),
        (
            f"channel.up={names}" if names else f"channel={type(channel).__name__}",
            type(channel) not in (Identity, Wire) or any(type(codec) is not ClipAndNoise for codec in codecs),
            "a masked sum is sent whole, so codecs save nothing and lose precision: leave channel.up out",
        ),
        (
            f"parts={', '.join(type(part).__name__ for part in parts)}",
            parts,
            "it looks at single updates: leave it out",
        ),
        (
            "fleet.buffered",
            settings["fleet"] is not None,
            "a masked sum needs its nodes at one time, and here each update arrives alone: leave fleet out",
        ),
        (
            "forward=ZerothOrder",
            settings["forward"] is not None,
            "it sends numbers of directions: leave it out",
        ),
    )
    for name, is_set, reason in refused:
        if is_set:
            raise ValueError(f"federated.{name} does not work with secure-aggregation: {reason}")
    if takers:
        raise ValueError(
            f"{takers[0]} among trainer.callbacks looks at single uploads, which secure-aggregation hides from the server: "
            "leave it out, or run it in the emulator"
        )
