import itertools
import logging
from types import SimpleNamespace

import pytest
import torch
from refusals import refusal
from torch import nn
from written_out import LR, assert_close, local, recorded, scaffold

from fedlight import Scaffold
from fedlight.federation.algorithm import aggregation_of, message_to
from fedlight.federation.client import Identity, Visit, Work, build_clients


class ByHand:
    """Rounds without Lightning: a client's gradient is the number that it is given."""

    def __init__(self, sizes, algorithm):
        self.clients = build_clients(sizes)
        self.algorithm, self.channel = algorithm, Identity()
        self.state = {"w": torch.tensor([0.0])}

    def round(self, gradients, num_steps=2, lr=0.5):
        federation = SimpleNamespace(clients=self.clients)
        cohort = [self.clients[name] for name in gradients]
        self.algorithm.start_round(0, cohort, federation)
        aggregation = aggregation_of(self.algorithm, len(self.clients))
        for client in cohort:
            visit = Visit(client.id, num_steps)
            received = self.channel.down(message_to(self.algorithm, visit, client, self.state), client).state
            visiting = self.algorithm.start_visit(visit, client, received)
            w = visiting.start["w"].clone()
            for _ in range(num_steps):
                value = gradients[client.id]
                found = {} if value is None else {"w": torch.tensor([value])}
                self.algorithm.adjust_gradients(visiting, {"w": w}, found)
                if "w" in found:
                    w -= lr * found["w"]
            work = Work(num_steps, lr, 0.0, 0.0, {"w": num_steps * lr})
            reply = self.algorithm.reply(visiting, {"w": w}, work)
            moved = self.channel.up(received, reply, client).state
            aggregation.add(self.algorithm.finish_visit(visiting, moved, work))
        movement = self.algorithm.finish_round(aggregation.result())
        assert list(movement) == ["w"]
        self.state = {"w": self.state["w"] + movement["w"].float()}

    def controls(self):
        return {name: c.memory["control"]["w"].item() for name, c in self.clients.items() if c.memory}

    @property
    def control(self):
        return self.algorithm.state_dict()["control"]["w"].item()


def test_a_tensor_without_a_gradient_has_a_gradient_of_zero():
    """Its client's control goes to 0, rather than by -c a visit for ever."""
    run = ByHand({"a": 1, "b": 1}, Scaffold())
    for _ in range(3):
        run.round({"a": 4.0, "b": None})
        assert run.controls()["a"] == 4.0
        assert run.controls().get("b", 0.0) == 0.0
        assert run.control == 2.0


def test_a_visit_that_says_nothing_changes_no_control():
    run = ByHand({"a": 1, "b": 1}, Scaffold())
    run.round({"a": 4.0, "b": 2.0})
    for nothing in ({"lr": 0.0}, {"num_steps": 0}):
        run.round({"a": 9.0}, **nothing)
        assert run.controls() == {"a": 4.0, "b": 2.0}
        assert run.control == 3.0


@pytest.mark.parametrize("weighting", ["unbiased", "uniform"])
def test_a_federation_equals_a_loop_written_out(weighting):
    start, end, rounds = recorded(rounds=6, algorithm=Scaffold(weighting))
    assert sum(len(of_clients) for of_clients in rounds) - len({*itertools.chain(*rounds)}) >= 5
    assert_close(end, scaffold(start, rounds, lambda _, *given: local(*given), lambda *_: 3 * LR, weighting))


def federation(robust=False, optimizers=None, model=None):
    model = model or nn.Linear(1, 1)
    optimizers = optimizers or [torch.optim.SGD(model.parameters(), lr=0.1)]
    return SimpleNamespace(module=model, optimizers=optimizers, robust=robust, train="backprop")


def test_what_does_not_fit_is_refused():
    Scaffold().check(federation())
    with refusal(r"take out aggregation"):
        Scaffold().check_settings(federation(robust=True))
    weight = nn.Parameter(torch.zeros(1))
    with refusal(r"LBFGS moves by many evaluations in a step: take torch.optim.SGD"):
        Scaffold().check(federation(optimizers=[torch.optim.LBFGS([weight])]))
    with refusal(r"minimized, and SGD has maximize=True"):
        Scaffold().check(federation(optimizers=[torch.optim.SGD([weight], lr=0.1, maximize=True)]))
    with refusal(r"control.weight is named as Scaffold names its controls"):
        Scaffold().check(federation(model=nn.ModuleDict({"control": nn.Linear(1, 1)})))
    several = nn.Linear(1, 1)
    several.adapter_names, several.use_adapter = ["adapter0", "adapter1"], print
    with refusal("2 adapters"):
        Scaffold().check(federation(model=several))
    with refusal("another algorithm than Scaffold made it"):
        Scaffold().load_state_dict({})


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1), None),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "Under SGD with momentum=0.9 its"),
        (lambda p: torch.optim.AdamW(p, lr=0.1), "Under AdamW its"),
    ],
)
def test_that_it_estimates_is_said_once_under_other_optimizers_with_the_remedy(optimizer, said, caplog):
    model = nn.Linear(1, 1)
    with caplog.at_level(logging.WARNING, "fedlight"):
        Scaffold().check(federation(optimizers=[optimizer(model.parameters())], model=model))
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == (said is not None)
    if said:
        assert said in lines[0]
        assert "torch.optim.SGD without momentum (model.optimizer.name=SGD)" in lines[0]
