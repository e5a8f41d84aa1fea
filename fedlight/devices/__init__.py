"""Emulated client devices: memory, speed, wire, power and hours of a phone, and the cost of a visit on it.

A `Device` is read from a profile, a `Fleet` says which client has which. `CostMeter` counts the FLOPs and the memory of a
training step, `fit` makes a visit fit the device, and `run_round` lets a round's visits run on a virtual clock.
"""

from fedlight.support.lazy import room_names

_FILES = {
    "load_device": "device",
    "Always": "availability",
    "Chance": "availability",
    "Trace": "availability",
    "BatchShape": "shape",
    "CostMeter": "cost",
    "StepCost": "cost",
    "QuantizedBase": "quantization",
    "Footprint": "memory",
    "fit": "memory",
    "Job": "clock",
    "Outcome": "clock",
    "run_round": "clock",
}
__getattr__ = room_names(__name__, _FILES)
