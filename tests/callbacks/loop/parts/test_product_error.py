import copy
from itertools import pairwise

import pytest
import torch
from lora_runs import (
    History,
    LoraModule,
    adapters,
    mean_products,
    products,
    relative_distance,
    run,
    weights_of,
)
from peft import LoraConfig, get_peft_model
from plain_lightning import Metrics, States, assert_equal
from stacked import Points, fit
from tastes import Adapters, Tastes
from tastes import run as train_selectors
from torch import nn
from two_parts import TwoParts

from fedlight import FedAdam, FedBiscuit, FedProx, LocalOnly, PrivateMean, Quantize, Scaffold, Visiting, Wire
from fedlight.callbacks.loop.parts import ProductError
from fedlight.federation import Algorithm, CoordinateMedian, TrimmedMean
from fedlight.federation.algorithms import Ditto, FedAvg, FedRep, GlobalThenLocal
from fedlight.federation.algorithms.lora import FedSALoRA, FFALoRA, RoLoRA
from fedlight.federation.lora import find_pairs


def multiplied_out(history, uploads, weighting):
    """Return the error of each round from uploads and the server's weights, by whole matrices."""
    found = []
    for idx, (before, after) in enumerate(pairwise(history.states)):
        ends = {client: state for (number, client), state in uploads.seen.items() if number == idx}
        mean = mean_products(before, [*ends.values()], weights_of([*ends], weighting))
        found.append(relative_distance(products(after), mean))
    return found


LINEAR = {
    "FedAvg": {"algorithm": FedAvg("unbiased")},
    "normalized": {"algorithm": FedAvg("normalized"), "clients_per_round": 2},
    "uniform": {"algorithm": FedAvg("uniform"), "clients_per_round": 3},
    "FedProx": {"algorithm": FedProx(0.5, "normalized")},
    "Scaffold": {"algorithm": Scaffold("normalized")},
    "Ditto": {"algorithm": Ditto(0.5, weighting="normalized")},
    "wire": {"algorithm": FedAvg("normalized"), "channel": Wire(up=Quantize("int8"), down=Quantize("fp16"))},
    "median": {"algorithm": FedAvg("normalized"), "aggregation": CoordinateMedian()},
    "private": {"algorithm": FedAvg("uniform"), "aggregation": PrivateMean(0.5, 0.3, delta=0.01)},
}


@pytest.mark.parametrize("name", LINEAR)
def test_it_is_the_distance_of_the_servers_product_from_the_mean_of_the_clients(name):
    uploads, parts = States(), copy.deepcopy(LINEAR[name])
    algorithm = parts.pop("algorithm")
    _, history, *_ = run(algorithm, module=LoraModule(lr=0.3), local_steps=6, callbacks=[uploads], **parts)
    expected = multiplied_out(history, uploads, algorithm.weighting)
    # uploads and weights are rounded to fp32
    assert history.errors == pytest.approx(expected, rel=1e-3, abs=1e-6)
    assert min(history.errors) > 1e-3


def test_layers_count_by_their_scaling():
    """As they do in the model: of two layers one has a scaling of 10, the other one of 2."""

    class Uneven(LoraModule):
        def __init__(self):
            super().__init__(lr=0.01)
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
            pattern = {"alpha_pattern": {"2": 20}, "target_modules": ["0", "2"]}
            self.net = get_peft_model(net, LoraConfig(r=2, lora_alpha=4, **pattern))
            for name, parameter in self.net.named_parameters():
                if "lora_B" in name:
                    nn.init.normal_(parameter, std=0.3)

    uploads = States()
    module, history, *_ = run(FedAvg("uniform"), rounds=1, module=Uneven(), callbacks=[uploads])
    scalings = {layer: module.get_submodule(layer).scaling["default"] for layer in products(adapters(module))}
    assert sorted(scalings.values()) == [2.0, 10.0]
    ends = {client: state for (_, client), state in uploads.seen.items()}
    mean = mean_products(history.states[0], [*ends.values()], weights_of([*ends], "uniform"))
    found = products(history.states[1])

    def scaled(matrices):
        return {layer: factor * matrices[layer] for layer, factor in scalings.items()}

    expected = relative_distance(scaled(found), scaled(mean))
    assert history.errors == [pytest.approx(expected, rel=1e-3)]
    assert abs(relative_distance(found, mean) / expected - 1) > 0.1


def test_a_server_optimizer_plays_no_part():
    """What is measured is the average that the server's optimizer gets."""
    _, plain, *_ = run(FedAvg(), rounds=1, module=LoraModule(lr=0.3))
    _, adam, *_ = run(FedAvg(), rounds=1, module=LoraModule(lr=0.3), server=FedAdam(0.1))
    assert adam.errors == plain.errors
    assert any(not torch.equal(value, plain.states[1][name]) for name, value in adam.states[1].items())


class KeepsB(Algorithm):
    """A client goes on with its own B, which is sent down once, and up in every visit as it is."""

    def send(self, visit, client, state):
        return {name: value for name, value in state.items() if name not in client.memory}

    def start_visit(self, visit, client, received):
        return Visiting(visit, client, received, start=received | client.memory)

    def reply(self, visiting, trained, work):
        visiting.client.memory |= {name: value for name, value in trained.items() if "lora_B" in name}
        return trained

    def finish_visit(self, visiting, movement, work):
        new = {
            n: value if n in visiting.received else torch.zeros_like(value) for n, value in movement.items()
        }
        return super().finish_visit(visiting, new, work)


def test_it_is_left_out_where_a_client_sends_a_factor_that_it_has_not_received():
    """Only the algorithm knows from where such a factor has moved; the first round, in which all is sent down, has it."""
    model, history, *_ = run(KeepsB(), rounds=2)
    assert [error is None for error in history.errors] == [False, True]
    assert_equal(adapters(model), adapters(run(KeepsB(), rounds=2, parts=[])[0]))


class LoraSelectors(Adapters):
    """Selectors that are products of two factors, by PEFT's names."""

    def __init__(self):
        super().__init__()
        del self.parts
        torch.manual_seed(0)
        self.q = nn.Module()
        self.q.lora_A = nn.ModuleDict({name: nn.Linear(4, 2, bias=False) for name in self.adapter_names})
        self.q.lora_B = nn.ModuleDict({name: nn.Linear(2, 1, bias=False) for name in self.adapter_names})

    def example_losses(self, batch):
        found = self.q.lora_B[self.active](self.q.lora_A[self.active](batch[0]))
        return (found - batch[1]).square()[:, 0]


def test_of_several_adapters_it_is_over_those_that_the_round_has_trained():
    history, uploads, module = History(), States(), LoraSelectors()
    algorithm = FedBiscuit(1, 2, weighting="normalized")
    train_selectors(algorithm, 5, module, [history, uploads], clients_per_round=5, parts=[ProductError()])
    data = Tastes()
    data.setup("fit")
    sizes = {client: len(own) for client, own in data.client_indices.items()}
    for idx, (before, after) in enumerate(pairwise(history.states)):
        distance = norm = 0.0
        ends = {client: state for (number, client), state in uploads.seen.items() if number == idx}
        trained = {pair.adapter for end in ends.values() for pair in find_pairs(end).pairs}
        for pair in [pair for pair in find_pairs(before).pairs if pair.adapter in trained]:
            own = {client: pair.product(end) for client, end in ends.items() if pair.a in end}
            total = sum(sizes[client] for client in own)
            mean = sum(sizes[client] / total * product for client, product in own.items())
            distance += float((pair.product(after) - mean).square().sum())
            norm += float(mean.square().sum())
        assert history.errors[idx] == pytest.approx((distance / norm) ** 0.5, rel=1e-3)
    assert len(trained) > 1


def test_it_changes_no_bit_of_a_run():
    runs = []
    for parts in ([ProductError()], []):
        module, history, _, rows, _ = run(FedAvg(), module=LoraModule("AdamW"), parts=parts)
        runs.append((adapters(module), [{k: v for k, v in row.items() if k != "seconds"} for row in rows]))
        assert (history.errors == [None] * 3) == (not parts)
    (state, rows), (state_without, rows_without) = runs
    assert_equal(state, state_without)
    assert rows == rows_without


class Median(FedAvg):
    def aggregation(self, num_clients):
        return CoordinateMedian()


LEFT_OUT = {
    "FedSALoRA": FedSALoRA(),
    "FedRep": FedRep(private=["lora_B"]),
    "FedPer": FedRep(private=["lora_A"], together=True),
    "LocalOnly": LocalOnly(),
    "GlobalThenLocal": GlobalThenLocal(2),  # nothing is sent in the last round
    "median": Median(),
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_it_is_left_out_where_clients_keep_a_factor_or_the_average_is_no_weighted_sum(name):
    _, history, *_ = run(copy.deepcopy(LEFT_OUT[name]))
    assert [error is None for error in history.errors] == [name != "GlobalThenLocal"] * 2 + [True]


def test_it_is_left_out_without_adapters():
    metrics = Metrics("fed/bytes_up", "product_error")
    fit(TwoParts(), Points(), rounds=1, callbacks=[metrics], parts=[ProductError()])
    assert [*metrics.rounds[0]] == ["fed/bytes_up"]


def test_a_wire_that_rounds_what_goes_down_is_part_of_the_error():
    """The fixed factor of a client is then not the server's."""
    _, fine, *_ = run(RoLoRA(), rounds=2)
    _, rounded, *_ = run(RoLoRA(), rounds=2, channel=Wire(down=Quantize("fp16")))
    assert max(fine.errors) < 1e-12
    assert all(1e-7 < error < 1e-2 for error in rounded.errors)


def test_what_is_no_plain_pair_is_said(caplog):
    class Mixed(LoraModule):
        def __init__(self):
            super().__init__()
            for name, parameter in self.named_parameters():
                if "2.lora_A" in name:
                    parameter.requires_grad_(False)

        def configure_optimizers(self):
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)

    _, history, *_ = run(FedAvg(), module=Mixed())
    assert min(history.errors) > 0
    assert "without 1 tensors such as" in caplog.text
    assert "2 has no lora_A of adapter default" in caplog.text


def test_ffa_lora_has_no_error_under_a_robust_mean_that_is_a_mean():
    """A trimmed mean of nothing trimmed is the uniform mean, which the algorithm says with its weighting."""
    _, history, *_ = run(FFALoRA("uniform"), aggregation=TrimmedMean(0.0))
    assert max(history.errors) < 1e-12
    _, history, *_ = run(FFALoRA("uniform"), aggregation=CoordinateMedian())
    assert min(history.errors) > 1e-4
