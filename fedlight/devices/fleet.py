"""Fleet of devices: which client has which, drawn by seed from kinds of devices with weights."""

from collections.abc import Iterable
from dataclasses import replace
from math import inf
from typing import Any

from omegaconf import OmegaConf

from fedlight.conf import path as conf_path
from fedlight.devices.device import Device, load_device
from fedlight.federation.asynchronous.fedbuff import FedBuff
from fedlight.support.checks import Checked
from fedlight.support.seeding import derive_seed


class Fleet(Checked):
    """Weighted list of devices.

    Args:
        devices: name of a profile, or a YAML file of your own -> weight above 0; weights need not sum to 1. Or the name of
            a fleet of fedlight, such as ``"phones"``. None: the nodes of a deployment, for buffered rounds.
        seed: seed of the draw.
        scale: divisor of the profiles' memory, speed and bandwidth, above 0; for a small model in place of one that is
            so many times larger.
        deadline_seconds: end of a round on the devices' virtual clock; clients that finish later are left out. None waits
            for all.
        over_selection: factor on ``clients_per_round``, at least 1: so many are asked, and the fastest
            ``clients_per_round`` count.
        buffered: rounds that are a server step with the updates that arrive first on the virtual clock, or in a deployment
            on the real one, each from the model that its client received: size of the buffer, clients at a time, weights of
            stale updates. None: a round asks a cohort and waits for it.

    Attributes:
        devices: name -> device, in the order given.
        weights: name -> share of the clients, summing to 1.

    Raises:
        FileNotFoundError: there is no such profile or fleet.
        ValueError: there is no device, a number is out of its range, or two files have one name.
    """

    def __init__(
        self,
        devices: dict[str, float] | str | None = None,
        seed: int = 0,
        scale: float = 1.0,
        deadline_seconds: float | None = None,
        over_selection: float = 1.0,
        buffered: FedBuff | None = None,
    ) -> None:
        if isinstance(devices, str):
            devices = _of_fleet(devices)
        if not 0 < scale < inf:
            raise ValueError(f"fleet.scale={scale} must be above 0; 1 leaves the devices as they are")
        if deadline_seconds is not None and not deadline_seconds > 0:
            raise ValueError(
                f"fleet.deadline_seconds={deadline_seconds} must be above 0, or null to wait for all"
            )
        if not 1 <= over_selection < inf:
            raise ValueError(
                f"fleet.over_selection={over_selection} must be at least 1: so many times clients_per_round"
            )
        if buffered is not None and (deadline_seconds is not None or over_selection != 1):
            raise ValueError(
                f"fleet.deadline_seconds={deadline_seconds} and fleet.over_selection={over_selection} are for rounds that "
                "wait for a cohort, and in buffered rounds the server steps when its buffer is full: leave them out"
            )
        if devices is None and buffered is not None:
            devices = {}
        elif not devices:
            raise ValueError("fleet.devices is empty: name at least one, such as {pixel_8_pro: 1}")
        for name, weight in devices.items():
            if not 0 < weight < inf:
                raise ValueError(
                    f"fleet.devices.{name}={weight} must be above 0: leave out a device that no client has"
                )
        loaded = [_scaled(load_device(name), scale) for name in devices]
        self.devices = {device.name: device for device in loaded}
        if len(self.devices) < len(loaded):
            names = [device.name for device in loaded]
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"fleet.devices has two files named {twice!r}: rename one, reports use the name")
        total = sum(devices.values())
        shares = [weight / total for weight in devices.values()]
        self.weights = dict(zip(self.devices, shares, strict=True))
        self.seed = seed
        self.deadline_seconds, self.over_selection = deadline_seconds, over_selection
        self.buffered = buffered

    def assign(self, client_ids: Iterable[str]) -> dict[str, Device]:
        """Return client id -> device, sorted by id and as near to the weights as whole clients allow.

        Args:
            client_ids: ids of all clients, each once; their order does not matter.

        Examples:
            >>> dealt = Fleet({"pixel_8_pro": 3, "raspberry_pi_5": 1}).assign(["a", "b", "c", "d"])
            >>> sorted(device.name for device in dealt.values())
            ['pixel_8_pro', 'pixel_8_pro', 'pixel_8_pro', 'raspberry_pi_5']
        """
        # A draw that does not depend on the order of the clients.
        drawn = sorted(client_ids, key=lambda name: (derive_seed(self.seed, "device", name), name))
        counts = apportion(list(self.weights.values()), len(drawn))
        dealt = [device for device, n in zip(self.devices.values(), counts, strict=True) for _ in range(n)]
        return dict(sorted(zip(drawn, dealt, strict=True)))


def known_fleets() -> list[str]:
    """Return the names of fedlight's fleets, sorted."""
    return sorted(file.stem for file in conf_path("devices/fleets").glob("*.yaml"))


def _of_fleet(name: str) -> dict[str, float]:
    if name not in known_fleets():
        raise FileNotFoundError(
            f"there is no fleet {name!r}: give one of {', '.join(known_fleets())}, or devices with their weights, such as "
            "{pixel_8_pro: 1}"
        )
    fleet: Any = OmegaConf.load(conf_path(f"devices/fleets/{name}.yaml"))
    return dict(fleet.init_args.devices)


def _scaled(device: Device, scale: float) -> Device:
    figures = ("memory_gib", "tflops", "download_mbps", "upload_mbps")
    return replace(device, **{name: getattr(device, name) / scale for name in figures})


def apportion(shares: list[float], total: int) -> list[int]:
    """Return whole numbers that sum to ``total``, nearest to the shares of it (method of largest remainders).

    Shares are at least 0 and sum to 1. Of equal remainders the first is rounded up.
    """
    # 0.1 + 0.2 is 0.3 plus a rounding error, which must not decide.
    quotas = [round(share * total, 9) for share in shares]
    counts = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(shares)), key=lambda i: round(counts[i] - quotas[i], 9))
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return counts
