"""Device: memory, speed, wire and power of one kind of hardware, and how exactly it can hold a base model.

A profile is a YAML file with the fields of `Device` except ``name``, which is the file's name. fedlight's are in
``conf/devices``.
"""

from dataclasses import dataclass, field, fields
from math import inf
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from yaml import YAMLError

from fedlight.conf import path as conf_path
from fedlight.devices.availability import Always, Availability, parse_availability
from fedlight.support.checks import read_yaml
from fedlight.support.files import BoundError

WEIGHT_BITS = (16, 8, 4)
OWN_FOLDER = Path("devices")
"""Folder, below the current one, of a project's own profiles; ``fedlight device measure`` writes there."""
MEGABIT = 1e6
TERA = 1e12


@dataclass(frozen=True, kw_only=True)
class Device:
    """One kind of device; its speeds are constant and do not depend on the machine that emulates it.

    Args:
        name: name in reports.
        memory_gib: all of its RAM, in GiB, above 0.
        tflops: peak of 10^12 operations a second at the precision computed in (16 bits), a multiply-add counting two.
        download_mbps: megabits a second from the server.
        upload_mbps: megabits a second to the server.
        watts: power drawn while it downloads, computes or uploads.
        weight_bits: of the frozen base: 16 (plain), 8 (int8) or 4 (NF4).
        memory_share: share of the RAM that training gets, in (0, 1]; the system and other apps have the rest.
        utilisation: share of the peak that training reaches, in (0, 1].
        availability: times when it can be asked.

    Raises:
        ValueError: a number is out of range.

    Examples:
        >>> phone = Device("phone", memory_gib=8, tflops=2, download_mbps=80, upload_mbps=16, watts=5)
        >>> phone.budget_bytes == 4 * 2**30
        True
        >>> phone.download_seconds(10_000_000), phone.compute_seconds(6 * 10**12), phone.upload_seconds(10_000_000)
        (1.0, 10.0, 5.0)
    """

    memory_gib: float
    tflops: float
    download_mbps: float
    upload_mbps: float
    watts: float
    weight_bits: int = 16
    memory_share: float = 0.5
    utilisation: float = 0.3
    name: str = field(kw_only=False)
    availability: Availability = field(default_factory=Always, kw_only=False)

    def __post_init__(self) -> None:
        for key in ("memory_gib", "tflops", "download_mbps", "upload_mbps", "watts"):
            self._check(key, inf)
        for key in ("memory_share", "utilisation"):
            self._check(key, 1)
        if type(self.weight_bits) is not int or self.weight_bits not in WEIGHT_BITS:
            raise ValueError(f"device {self.name!r}: weight_bits={self.weight_bits!r} must be 16, 8 or 4")

    def _check(self, key: str, high: float) -> None:
        value = getattr(self, key)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)  # True is an int
        if not is_number or not 0 < value <= high or value == inf:
            below = f" and at most {high:g}" if high < inf else ""
            raise ValueError(f"device {self.name!r}: {key}={value!r} must be a number above 0{below}")

    @property
    def budget_bytes(self) -> int:
        """Bytes that training may take at its peak."""
        return int(self.memory_gib * self.memory_share * 2**30)

    def download_seconds(self, num_bytes: int) -> float:
        """Return the seconds that so many bytes take from the server."""
        return num_bytes * 8 / (self.download_mbps * MEGABIT)

    def compute_seconds(self, flops: float) -> float:
        """Return the seconds that so many floating point operations take."""
        return flops / (self.tflops * self.utilisation * TERA)

    def upload_seconds(self, num_bytes: int) -> float:
        """Return the seconds that so many bytes take to the server."""
        return num_bytes * 8 / (self.upload_mbps * MEGABIT)


def load_device(name_or_file: str) -> Device:
    """Return the device of a profile of fedlight such as ``"pixel_8_pro"``, or of your own.

    Args:
        name_or_file: name of a profile of fedlight, or of one in the folder ``devices`` here; or a YAML file.

    Raises:
        FileNotFoundError: there is no such profile.
        ValueError: the file is no profile, or a number is missing or out of range.

    Examples:
        >>> load_device("raspberry_pi_5").memory_gib
        8.0
    """
    file = _find(name_or_file)
    keys = {each.name: each for each in fields(Device) if each.name != "name"}
    known = ", ".join(keys)
    try:
        given: Any = OmegaConf.to_container(OmegaConf.create(read_yaml(file)))
        if not given or not isinstance(given, dict):
            raise ValueError("this is no device: it has no keys such as memory_gib")
        availability = parse_availability(given.pop("availability", "always"))
        if (empty := next((key for key, value in given.items() if value is None), None)) is not None:
            raise ValueError(f"{empty} is null: it could not be measured; write in a number above 0")
        if unknown := [key for key in given if key not in keys]:
            raise ValueError(f"there is no key {unknown[0]!r} of a device; there are {known}")
        needed = [name for name, each in keys.items() if each.default is each.default_factory]  # both MISSING
        if missing := [name for name in needed if name not in given]:
            raise ValueError(f"{missing[0]} is missing; a device has {known}")
        numbers: Any = {k: float(v) if type(v) is int and k != "weight_bits" else v for k, v in given.items()}
        return Device(file.stem, availability=availability, **numbers)
    except BoundError:  # it names the file
        raise
    except (YAMLError, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is no YAML that can be read: {' '.join(str(error).split())}") from None
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def _find(name_or_file: str) -> Path:
    file = Path(name_or_file).expanduser()
    if file.suffix in (".yaml", ".yml") and file.is_file():
        return file
    if (name := name_or_file.removesuffix(".yaml")) in known_devices():
        return conf_path(f"devices/{name}.yaml")
    if name == Path(name).name and (measured := OWN_FOLDER / f"{name}.yaml").is_file():
        return measured
    raise FileNotFoundError(
        f"there is no device {name_or_file!r}: give a YAML file of your own, the name of one in {OWN_FOLDER}/ here, or one "
        f"of {', '.join(known_devices())}"
    )


def known_devices() -> list[str]:
    """Return the names of fedlight's profiles, sorted."""
    return sorted(file.stem for file in conf_path("devices").glob("*.yaml"))
