"""Emulated client devices: memory, speed, wire, power and hours of a phone, and what a visit costs on it.

A `Device` is read from a profile, a `Fleet` says which client has which. `CostMeter` counts the FLOPs and the memory of a
training step, `fit` makes a visit fit the device, and `run_round` lets a round's visits run on a virtual clock.
"""

from fedlight.support.lazy import lazy_names

_FILES = {
    **{"Device": "device", "load_device": "device", "Fleet": "fleet", "BatchShape": "shape"},
    **{"CostMeter": "cost", "StepCost": "cost", "QuantizedBase": "quantization", "fit": "memory"},
    **{"Job": "clock", "Outcome": "clock", "run_round": "clock"},
}
__all__ = [*_FILES]
__getattr__ = lazy_names(__name__, _FILES)
