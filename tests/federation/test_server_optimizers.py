import copy
import math

import numpy as np
import pytest
import torch
from memories import through_a_file
from plain_lightning import assert_equal, federate, weights
from refusals import refusal

from fedlight.federation import Average, FedAdagrad, FedAdam, FedAvgM, FedYogi

ALL = {
    "avgm": lambda: FedAvgM(lr=0.9, beta=0.8),
    "adagrad": lambda: FedAdagrad(lr=0.1, tau=0.01),
    "adam": lambda: FedAdam(lr=0.1, tau=0.01),
    "yogi": lambda: FedYogi(lr=0.1, tau=0.01),
}


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def path(server, movements, start=1.0):
    """Where one number goes."""
    state, found = {"w": torch.tensor([start])}, []
    for value in movements:
        state = server.step(state, {"w": tensor(value)})
        found.append(state["w"].item())
    return found


def written_out_step(kind, moments, d, lr=0.1, beta1=0.9, beta2=0.99, tau=0.01):
    """One round's step for one tensor and the moments after it, from the papers' formulas."""
    if kind == "avgm":
        velocity = beta1 * moments.get("velocity", 0.0) + d
        return lr * velocity, {"velocity": velocity}
    m = beta1 * moments.get("m", 0.0) + (1 - beta1) * d
    v = moments.get("v", tau**2)
    if kind == "adagrad":
        v = v + d**2
    elif kind == "adam":
        v = beta2 * v + (1 - beta2) * d**2
    else:
        v = torch.where(d**2 > v, v + (1 - beta2) * d**2, v - (1 - beta2) * d**2)
    return lr * m / (v**0.5 + tau), {"m": m, "v": v}


@pytest.mark.parametrize(
    ("kind", "server"),
    [
        ("avgm", FedAvgM(lr=0.3, beta=0.7)),
        ("adagrad", FedAdagrad(lr=0.3, beta1=0.7, tau=0.05)),
        ("adam", FedAdam(lr=0.3, beta1=0.7, beta2=0.9, tau=0.05)),
        ("yogi", FedYogi(lr=0.3, beta1=0.7, beta2=0.9, tau=0.05)),
    ],
)
def test_steps_by_hand(kind, server):
    movements = [0.5, -0.25, 2.0, 0.01, 0.0, -1.0]
    expected, moments = [1.0], {}
    for d in movements:
        step, moments = written_out_step(kind, moments, tensor(d), lr=0.3, beta1=0.7, beta2=0.9, tau=0.05)
        expected.append(np.float32(expected[-1] + step.item()))
    assert path(server, movements) == pytest.approx(expected[1:], rel=1e-7)


def test_defaults_are_the_papers():
    """One movement of 1 from v = 1e-6: 1e-3 * 0.1 / (sqrt(v) + 1e-3)."""
    step = {"adagrad": math.sqrt(1e-6 + 1), "adam": math.sqrt(0.99e-6 + 0.01), "yogi": math.sqrt(1e-6 + 0.01)}
    servers = {"adagrad": FedAdagrad(), "adam": FedAdam(), "yogi": FedYogi()}
    for name, server in servers.items():
        assert path(server, [1.0], 0.0) == pytest.approx([1e-3 * 0.1 / (step[name] + 1e-3)], rel=1e-6)


@pytest.mark.parametrize("kind", ALL)
def test_what_nobody_sent_keeps_its_value_and_its_moments(kind):
    server = ALL[kind]()
    state = {"a": torch.tensor([1.0]), "b": torch.tensor([1.0])}
    state = server.step(state, {"a": tensor(0.5), "b": tensor(0.5)})
    remembered = copy.deepcopy(server.state_dict())
    later = server.step(state, {"a": tensor(0.5)})
    assert torch.equal(later["b"], state["b"])
    assert not torch.equal(later["a"], state["a"])
    for moment, tensors in server.state_dict().items():
        assert torch.equal(tensors["b"], remembered[moment]["b"])
        assert tensors["b"].dtype == torch.float64
    # b goes on as if the round without it had not been
    assert torch.equal(server.step(later, {"b": tensor(0.5)})["b"], later["a"])


@pytest.mark.parametrize("kind", ALL)
def test_state_goes_through_a_safe_file_and_back_bit_for_bit(kind):
    movements = [0.3, -0.2, 0.7, 0.1]
    whole = path(ALL[kind](), movements)
    first = ALL[kind]()
    state = path(first, movements[:2])[-1]
    kept = first.state_dict()
    saved = through_a_file(kept)
    path(first, [9.0])  # what was taken before does not change
    for given in (kept, saved):
        second = ALL[kind]()
        second.load_state_dict(given)
        assert path(second, movements[2:], state) == whole[2:]


def test_moments_of_another_server_are_refused():
    server = FedAvgM()
    path(server, [1.0])
    with refusal(r"remembers \['velocity'\], but FedAdam needs \['first', 'second'\]"):
        FedAdam().load_state_dict(server.state_dict())
    with refusal("but Average needs"):
        Average().load_state_dict(server.state_dict())
    FedAdam().load_state_dict(Average().state_dict())


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: FedAvgM(lr=0), "lr=0 must be above 0"),
        (lambda: FedAvgM(beta=1.0), r"beta=1.0 must be at least 0 and below 1"),
        (lambda: FedAdagrad(beta1=-0.1), r"beta1=-0.1 must be"),
        (lambda: FedAdam(beta2=1.0), r"beta2=1.0 must be"),
        (lambda: FedAdam(lr=float("nan")), "lr=nan must be above 0"),
        (lambda: FedYogi(tau=0.0), r"tau=0.0 must be above 0"),
    ],
)
def test_values_out_of_range_are_refused(make, complaint):
    with refusal(complaint):
        make()


def test_momentum_of_zero_is_averaging_bit_for_bit():
    plain, _ = federate(rounds=4)
    momentum, _ = federate(rounds=4, server=FedAvgM(beta=0.0))
    assert_equal(weights(plain), weights(momentum))
