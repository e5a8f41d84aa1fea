import copy
from itertools import pairwise

import pytest
import torch
from fleets import make_fleet
from lora_runs import (
    LoraModule,
    adapters,
    local_ends,
    mean_products,
    moved,
    products,
    relative_distance,
    run,
    weights_of,
)
from peft import LoraConfig, get_peft_model
from plain_lightning import assert_equal
from refusals import refusal
from stacked import CLIENTS, Lora, Points, fit
from torch import nn
from two_parts import TwoParts, close

from fedlight import ClipAndNoise, CoordinateMedian, FedAdam, FedProx, Scaffold, TopK, Wire
from fedlight.federation import Algorithm, Average
from fedlight.federation.algorithms import FedRep
from fedlight.federation.algorithms.lora import FedSALoRA, FFALoRA, ProductAverage, RoLoRA
from fedlight.federation.client import serialized_bytes
from fedlight.federation.forward import ZerothOrder
from fedlight.federation.lora.pairs import factor_of, find_pairs

ALL = {
    "FFALoRA": FFALoRA(),
    "RoLoRA": RoLoRA(),
    "FedSALoRA": FedSALoRA(),
    "ProductAverage": ProductAverage(),
    "threshold": ProductAverage(threshold=0.9),
}
OPTIMIZERS = {
    "SGD": {"optimizer": "SGD"},
    "momentum": {"optimizer": "SGD", "momentum": 0.9, "weight_decay": 0.2},
    "AdamW": {"optimizer": "AdamW", "lr": 0.02, "weight_decay": 0.3},
}
WEIGHTINGS = [("SGD", "unbiased"), ("momentum", "normalized"), ("AdamW", "uniform")]


def of(state, *factors):
    """Return the tensors of these factors."""
    return {name: value for name, value in state.items() if factor_of(name) in factors}


def as_float(state):
    return {name: value.float() for name, value in state.items()}


class OddRank(LoraModule):
    """A layer of five outputs in the place of one, so that no product of the second layer has rank 1, and a head."""

    def __init__(self, **options):
        super().__init__(**options)
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 1))
        config = LoraConfig(r=3, lora_alpha=6, target_modules=["0", "2"], modules_to_save=["4"])
        self.net = get_peft_model(net, config)
        for name, parameter in self.net.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.3)


HEAD = "net.base_model.model.4.modules_to_save.default.weight"


@pytest.mark.parametrize(("optimizer", "weighting"), WEIGHTINGS)
@pytest.mark.parametrize("kind", [FFALoRA, RoLoRA])
def test_steps_equal_training_of_one_factor_alone(kind, optimizer, weighting):
    """B, or B and A in turns; the reference's optimizer holds that and the head alone, so nothing moves the other there."""
    module = OddRank(**OPTIMIZERS[optimizer])
    start = adapters(module)
    module, history, visits, rows, _ = run(kind(weighting), rounds=4, module=module, clients_per_round=2)
    for idx, (before, after) in enumerate(pairwise(history.states)):
        trained, fixed = ("A", "B") if kind is RoLoRA and idx % 2 else ("B", "A")
        ends = local_ends(module, before, visits[idx], {*start} - {*of(start, fixed)})
        close(after, as_float(moved(before, [*ends.values()], weights_of(ends, weighting))), 5e-6)
        assert_equal(of(after, fixed), of(before, fixed))
        assert all(not torch.equal(value, before[name]) for name, value in of(after, trained, None).items())
        split = trained if kind is RoLoRA else "train"
        assert {row["split"] for row in rows if row["round"] == idx} == {split}
    assert max(history.errors) < 1e-12


def fresh(**options):
    """A module whose adapters are new: B is 0."""
    module = LoraModule(**options)
    for name, parameter in module.named_parameters():
        if "lora_B" in name:
            nn.init.zeros_(parameter)
    return module


def cut_to_one(module):
    """Leave the pairs of a module one direction; return the algorithm that knows, and the pairs."""
    algorithm, pairs = ProductAverage(0.99999), find_pairs(adapters(module)).pairs
    with torch.no_grad():
        for pair in pairs:
            module.get_parameter(pair.a)[1:] = 0
            module.get_parameter(pair.b)[:, 1:] = 0
    algorithm.load_state_dict({"ranks": {pair.a: 1 for pair in pairs}})
    return algorithm, pairs


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_fedsa_lora_is_fedper_with_the_b_of_the_adapters_for_a_head(optimizer):
    """The rounds of FedPer are written out in test_fedrep."""
    per = FedRep(private=["lora_B"], together=True, weighting="normalized")
    (one, history, _, rows, loop), (two, _, _, others, other) = (
        run(algorithm, rounds=4, module=OddRank(**OPTIMIZERS[optimizer]), clients_per_round=2)
        for algorithm in (FedSALoRA("normalized"), per)
    )
    assert_equal(adapters(one), adapters(two))
    assert_equal(of(adapters(one), "B"), of(history.states[0], "B"))
    own = {client: loop.own_state(client) for client in CLIENTS}
    assert sum(state is not None for state in own.values()) > 2
    for client, state in own.items():
        assert_equal(state or {}, other.own_state(client) or {})
    assert [row["bytes_up"] for row in rows] == [row["bytes_up"] for row in others]


@pytest.mark.parametrize(("optimizer", "weighting"), WEIGHTINGS)
def test_product_average_averages_products(optimizer, weighting):
    """Multiplied out and cut by numpy's singular value decomposition of the whole matrices."""
    algorithm, module = ProductAverage(weighting=weighting), OddRank(**OPTIMIZERS[optimizer])
    ranks = {pair.layer: 3 for pair in find_pairs(adapters(module)).pairs}
    module, history, visits, _, _ = run(algorithm, module=module, clients_per_round=2)
    for idx, (before, after) in enumerate(pairwise(history.states)):
        ends = local_ends(module, before, visits[idx])
        weights = weights_of(ends, weighting)
        whole = mean_products(before, [*ends.values()], weights)
        best = {layer: cut(matrix, ranks[layer]) for layer, matrix in whole.items()}
        assert relative_distance(products(after), best) < 5e-6
        assert history.errors[idx] == pytest.approx(relative_distance(best, whole), rel=1e-4, abs=1e-7)
        head = {name: value for name, value in before.items() if factor_of(name) is None}
        expected = moved(head, [{n: end[n] for n in head} for end in ends.values()], weights)
        close({name: after[name] for name in head}, as_float(expected), 5e-6)
    assert max(history.errors) > 1e-4  # the mean of two or three products has a larger rank


class Dora(LoraModule):
    def __init__(self):
        super().__init__()
        net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        self.net = get_peft_model(net, LoraConfig(r=2, target_modules=["0"], use_dora=True))


def cut(matrix, rank):
    u, s, v = torch.linalg.svd(matrix)
    return u[:, :rank] * s[:rank] @ v[:rank]


def test_a_threshold_cuts_what_is_sent():
    module = OddRank(lr=0.3)
    _, history, visits, rows, loop = run(ProductAverage(0.9), rounds=5, module=module, local_steps=6)
    whole = adapters(module)
    pairs = find_pairs(whole).pairs
    used, seen = dict.fromkeys([pair.a for pair in pairs], 3), []
    for idx, (before, after) in enumerate(pairwise(history.states)):
        small = {name: value for name, value in before.items() if factor_of(name) is None}
        for pair in pairs:
            assert before[pair.a][used[pair.a] :].count_nonzero() == 0
            assert before[pair.b][:, used[pair.a] :].count_nonzero() == 0
            small |= {pair.a: before[pair.a][: used[pair.a]], pair.b: before[pair.b][:, : used[pair.a]]}
        ends = local_ends(module, before, visits[idx])
        assert {row["bytes_down"] for row in rows if row["round"] == idx} == {serialized_bytes(small)}
        assert {row["bytes_up"] for row in rows if row["round"] == idx} == {serialized_bytes(small)}
        mean = mean_products(before, [*ends.values()], weights_of(ends, "unbiased"))
        for pair in pairs:
            s = torch.linalg.svdvals(mean[pair.layer]).square()
            used[pair.a] = min(3, next(p for p in range(1, 9) if s[:p].sum() >= 0.9 * s.sum()))
            expected = cut(mean[pair.layer], used[pair.a])
            found = products(after)[pair.layer]
            assert float((found - expected).norm() / expected.norm()) < 1e-5
        seen.append(sum(used.values()))
    assert min(seen) < 6 < 2 * max(seen)
    assert loop.algorithm.state_dict()["ranks"] == {name: rank for name, rank in used.items() if rank < 3}


def test_forward_only_visits_leave_ranks_alone_that_a_threshold_has_cut():
    """With one client and no batch to spare, the rows that are 0 are 0 in the passes, and in what the visit has trained."""
    seen = []

    class Passes(OddRank):
        def training_step(self, batch, batch_idx):
            seen.append(adapters(self))
            return super().training_step(batch, batch_idx)

    module = Passes(lr=0.3)
    algorithm, pairs = cut_to_one(module)
    run(algorithm, rounds=1, module=module, forward=ZerothOrder())
    assert len(seen) == 4 * 3 * 2  # clients, steps, passes
    for pair in pairs:
        assert not any(state[pair.a][1:].any() or state[pair.b][:, 1:].any() for state in seen)
        assert len({state[pair.b][0, 0].item() for state in seen}) > 20


def test_a_product_of_nothing_leaves_the_factors():
    _, history, *_ = run(ProductAverage(), rounds=2, module=fresh(lr=0.0))
    assert_equal(history.states[-1], history.states[0])
    assert history.errors == [0.0, 0.0]


LOCAL = {
    "FFALoRA": (FFALoRA, lambda name: factor_of(name) != "A"),
    "RoLoRA": (RoLoRA, lambda name: factor_of(name) != "A"),  # the first round
    "FedSALoRA": (FedSALoRA, lambda name: factor_of(name) != "B"),
    "ProductAverage": (ProductAverage, lambda name: True),
}


@pytest.mark.parametrize("name", LOCAL)
def test_clients_may_hold_what_is_shared_near_what_they_received(name):
    """The proximal term of FedProx in the loss of the reference, on what is averaged alone."""
    kind, is_held = LOCAL[name]
    module, mu = OddRank(), 2.0
    start = adapters(module)
    _, history, visits, _, loop = run(kind(local=FedProx(mu)), rounds=1, module=module)
    held = {*filter(is_held, start)}

    def proximal(weights):
        return mu / 2 * sum((weights[n] - start[n]).square().sum() for n in held)

    names = {*start} if name in ("FedSALoRA", "ProductAverage") else held
    ends = local_ends(module, start, visits[0], names, add=proximal)
    weights = weights_of(ends, "unbiased")
    if name == "ProductAverage":
        whole = mean_products(start, [*ends.values()], weights)
        best = {layer: cut(matrix, 3) for layer, matrix in whole.items()}
        assert relative_distance(products(history.states[1]), best) < 5e-6
        return
    expected = as_float(moved(start, [*ends.values()], weights))
    close({n: history.states[1][n] for n in held}, {n: expected[n] for n in held}, 5e-6)
    if name == "FedSALoRA":
        for client, end in ends.items():
            close(loop.own_state(client), of(end, "B"), 5e-6)


class Near(Algorithm):
    """FedProx whose strength is kept with the visit."""

    def start_visit(self, visit, client, received):
        visiting = super().start_visit(visit, client, received)
        visiting.notes["mu"] = 0.5
        return visiting

    def adjust_gradients(self, visiting, parameters, gradients):
        FedProx(visiting.notes["mu"]).adjust_gradients(visiting, parameters, gradients)


@pytest.mark.parametrize("make", [FFALoRA, RoLoRA, FedSALoRA, lambda **own: ProductAverage(0.9, **own)])
def test_a_local_algorithm_starts_its_visits(make):
    """Two rounds, so that both factors of RoLoRA have their turn and ranks are cut."""
    own, *_ = run(make(local=Near()), rounds=2, module=OddRank(lr=0.3))
    expected, *_ = run(make(local=FedProx(0.5)), rounds=2, module=OddRank(lr=0.3))
    assert_equal(adapters(own), adapters(expected))


@pytest.mark.parametrize("kind", [FFALoRA, RoLoRA, FedSALoRA, ProductAverage])
def test_a_local_algorithm_that_does_more_than_change_gradients_is_refused(kind):
    with refusal(f"local=Scaffold changes .*: inside {kind.__name__} a local algorithm"):
        kind(local=Scaffold())


@pytest.mark.parametrize("name", ["FFALoRA", "RoLoRA", "FedSALoRA", "ProductAverage"])
def test_bytes_on_the_wire_are_those_of_what_is_sent(name):
    module = OddRank()
    _, _, _, rows, _ = run(copy.deepcopy(ALL[name]), rounds=2, module=module)
    state = adapters(module)
    a, b, both = (serialized_bytes(of(state, *kinds, None)) for kinds in ("A", "B", "AB"))
    assert max(a, b) < both
    expected = {
        "FFALoRA": [(b, b), (b, b)],
        "RoLoRA": [(both, b), (both, a)],
        "FedSALoRA": [(both, a), (a, a)],
        "ProductAverage": [(both, both), (both, both)],
    }[name]
    for idx, bytes_ in enumerate(expected):
        assert {(row["bytes_down"], row["bytes_up"]) for row in rows if row["round"] == idx} == {bytes_}


@pytest.mark.parametrize("name", ALL)
def test_bytes_on_devices_are_known_before_a_round(name, tmp_path, caplog):
    """The clock warns where a visit sends other bytes than were planned by names and shapes."""
    fleet = make_fleet(tmp_path, phone={})
    _, _, _, rows, _ = run(copy.deepcopy(ALL[name]), module=OddRank(lr=0.3), fleet=fleet, local_steps=6)
    assert len(rows) == 12
    assert "was to send" not in caplog.text


class Norms(ClipAndNoise):
    """What is clipped, and the numbers that get noise."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._seen = []

    def encode(self, values, sizes):
        self._seen.append(values.numel())
        return super().encode(values, sizes)


def test_under_ffa_lora_clipping_and_noise_see_b_alone():
    codec = Norms(0.5, 0.1, delta=0.01)
    module, history, *_ = run(FFALoRA(), rounds=1, channel=Wire(up=codec))
    b = sum(value.numel() for value in of(adapters(module), "B").values())
    assert {*codec._seen} == {b}
    assert_equal(of(history.states[1], "A"), of(history.states[0], "A"))
    assert max(history.errors) < 1e-12  # the mean of noisy products is the product of the noisy mean


@pytest.mark.parametrize("name", ["FFALoRA", "RoLoRA", "FedSALoRA", "ProductAverage"])
@pytest.mark.parametrize(
    ("module", "message"),
    [
        (TwoParts, "treats the factors .* none of the 4 trained parameters is one, such as body"),
        (Dora, "is for plain LoRA .* lora_magnitude_vector is no factor"),
    ],
)
def test_a_module_without_plain_adapters_is_refused(name, module, message):
    with refusal(f"algorithm={name} {message}"):
        fit(module(), Points(), rounds=1, algorithm=copy.deepcopy(ALL[name]))


def test_an_a_of_zeros_cannot_stay_as_it_is():
    module = LoraModule()
    for name, parameter in module.named_parameters():
        if "2.lora_A" in name:
            nn.init.zeros_(parameter)
    with refusal(r"2.lora_A.default.weight is 0 in all places, so this layer would learn nothing"):
        fit(module, Points(), rounds=1, algorithm=FFALoRA())


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"aggregation": CoordinateMedian()}, "an aggregation combines coordinates: take it out"),
        ({"server": FedAdam()}, "take Average with lr=1, or FFALoRA"),
        ({"server": Average(0.5)}, "take Average with lr=1, or FFALoRA"),
        ({"channel": Wire(up=TopK(0.5, error_feedback=True))}, "set error_feedback=false in the codecs"),
    ],
)
def test_what_takes_factors_for_fixed_coordinates_is_refused(parts, message):
    with refusal(f"ProductAverage replaces the factors A and B by others .*{message}"):
        fit(Lora(), Points(), rounds=1, algorithm=ProductAverage(), **parts)


def test_a_checkpoint_of_another_algorithm_is_refused():
    with refusal("has no ranks, so another algorithm than ProductAverage made it"):
        ProductAverage().load_state_dict({})
