import random

import pytest
import torch
from refusals import refusal
from safetensors.torch import save

from fedlight.federation.algorithm import Average, WeightedSum
from fedlight.federation.algorithms.fedavg import FedAvg
from fedlight.federation.client import (
    TYPES,
    Client,
    Update,
    build_clients,
    movement,
    read,
    serialized_bytes,
    uniform_cohort,
    write,
)


def test_one_client_gets_its_own_parameters_back_bit_for_bit():
    generator = torch.Generator().manual_seed(0)
    received = {"w": torch.randn(10_000, generator=generator)}
    # from tiny to huge: in fp32, w + (v - w) misses v in some of these
    scale = 10 ** (torch.rand(10_000, generator=generator) * 12 - 6)
    trained = {"w": scale * torch.randn(10_000, generator=generator)}
    assert not torch.equal(received["w"] + (trained["w"] - received["w"]), trained["w"])
    result = WeightedSum("count", scale=1)
    result.add(Update("only", movement(received, trained), weight=1.0))
    assert torch.equal(Average().step(received, result.result())["w"], trained["w"])


def test_updates_without_weight_move_nothing():
    result = WeightedSum("weight")
    result.add(Update("only", {"w": torch.ones(2)}, weight=0.0))
    assert result.result()["w"].tolist() == [0.0, 0.0]


def test_read_is_a_copy_and_write_is_in_place():
    parameter = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    state = read({"w": parameter})
    with torch.no_grad():
        parameter.add_(1)
    assert state["w"].tolist() == [1.0, 2.0]
    address = parameter.data_ptr()
    write(state, {"w": parameter})
    assert parameter.tolist() == [1.0, 2.0]
    assert parameter.data_ptr() == address
    narrow = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    write(state, {"w": narrow})
    assert narrow.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64])
def test_a_movement_takes_every_type_of_number(dtype):
    value = torch.tensor([1.5, -3.0]).to(dtype).requires_grad_(dtype.is_floating_point)
    trained = {"w": value, "n": torch.tensor(2.0)}
    found = movement({"w": torch.tensor([0.25, 1.0])}, trained)
    assert all(value.dtype == torch.float64 and not value.requires_grad for value in found.values())
    assert found["w"].tolist() == [trained["w"][0].item() - 0.25, -4.0]
    assert found["n"].item() == 2.0


def test_bytes_of_any_layout_are_those_of_a_file():
    draw = random.Random(0)
    for _ in range(200):
        state = {
            "".join(draw.choices('ab.é"\\\t漢', k=draw.randint(1, 6))): torch.zeros(
                draw.choices([0, 1, 3, 40], k=draw.randint(0, 3)), dtype=draw.choice([*TYPES])
            )
            for _ in range(draw.randint(1, 8))
        }
        assert serialized_bytes(state) == len(save(state)), state


def test_cohorts_depend_on_seed_and_round_alone():
    clients = [Client(f"c{i:03d}", 1, 0.01) for i in range(100)]
    first = [uniform_cohort(clients, 10, seed=0, round_idx=r) for r in range(20)]
    again = [uniform_cohort(clients, 10, seed=0, round_idx=r) for r in reversed(range(20))][::-1]
    assert first == again
    assert all(len({c.id for c in cohort}) == 10 for cohort in first)
    assert len({tuple(c.id for c in cohort) for cohort in first}) == 20
    assert uniform_cohort(clients, 10, seed=1, round_idx=0) != first[0]


def test_clients_are_ordered_by_id():
    assert list(build_clients({"b": 1, "a": 1})) == ["a", "b"]


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: build_clients({"a": 2, "b": 0}), "the first is 'b'"),
        (lambda: build_clients({}), "no clients"),
        (lambda: build_clients({"c\ud800": 1}), r"'c\\ud800' has half of a character, which no file"),
        (lambda: FedAvg("avg"), "weighting='avg' is not one of"),
        (lambda: Average(0), r"lr=0 must be above 0"),
    ],
)
def test_what_cannot_be_is_refused(make, complaint):
    with refusal(complaint):
        make()
