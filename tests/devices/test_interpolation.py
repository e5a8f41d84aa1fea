import random

import pytest

from fedlight import DPOModule, Lora, SelectorModule, SFTModule
from fedlight.devices import CostMeter
from fedlight.devices.shape import BatchShape, anchors


def shapes(number, with_responses, most=300):
    draw = random.Random(0)
    for _ in range(number):
        examples, tokens = draw.randint(1, 40), draw.randint(2, most)
        responses = draw.randint(1, examples * (tokens - 1)) if with_responses else 0
        yield BatchShape(examples, tokens, responses)


def test_a_polynomial_is_met_exactly_and_every_anchor_is_a_batch_that_can_be():
    def cost(shape):
        return shape.examples * (5 + 7 * shape.tokens + 3 * shape.tokens**2)

    for shape in shapes(1000, with_responses=True, most=3000):
        found = anchors(shape)
        assert sum(found.values()) == 1
        assert sum(weight * cost(anchor) for anchor, weight in found.items()) == cost(shape)
        assert all(anchor.responses <= anchor.examples * (anchor.tokens - 1) for anchor in found)
        labelled = sum(weight * anchor.responses for anchor, weight in found.items())
        assert abs(labelled - shape.responses) < 3  # of an anchor there is a whole number


@pytest.mark.slow
@pytest.mark.parametrize("kind", [SelectorModule, SFTModule, DPOModule])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_what_follows_is_what_is_counted(kind, checkpointing):
    meter = CostMeter(kind("toy"))
    for shape in shapes(2, with_responses=kind is not SelectorModule):
        found, counted = meter.cost(shape, checkpointing), meter._count(shape, checkpointing)
        assert found.activation_bytes == pytest.approx(counted.activation_bytes, rel=1e-3)
        assert found.flops == pytest.approx(counted.flops, rel=1e-4 if shape.responses else 1e-12)


def test_a_few_shapes_are_counted_for_many(monkeypatch):
    monkeypatch.setattr("fedlight.devices.cost.COUNTED", {})
    counted, count = [], CostMeter._count
    monkeypatch.setattr(CostMeter, "_count", lambda self, *key: counted.append(key) or count(self, *key))
    for settings, number in (({}, 5), ({}, 5), ({"lora": Lora(rank=2)}, 10)):  # 32, 48, 64, 96 and 128 tokens
        meter = CostMeter(SelectorModule("toy", **settings))
        for tokens in range(33, 128):
            meter.cost(BatchShape(16, tokens))
        assert len(counted) == number  # another run of the same module counts nothing
