"""What goes over the wire in a visit, and what of it the server can be asked about."""

import torch

from fedlight.callbacks.loop.exchange import Exchange
from fedlight.federation.algorithm import Algorithm
from fedlight.federation.algorithms.scaffold import Scaffold
from fedlight.federation.channel import Identity
from fedlight.federation.client import Client, Visit, Work

WORK = Work(num_steps=1, lr=1.0, mean_loss=0.0, seconds=0.0, lr_sums={"w": 1.0})
STATE = {"w": torch.tensor([1.0, 2.0])}


def test_an_upload_is_what_the_client_sent_and_stays_until_the_next():
    exchange, first, second = (
        Exchange(Algorithm(), Identity(), seed=0),
        Client("a", 1, 0.5),
        Client("b", 1, 0.5),
    )
    exchange.start_round(4)
    assert exchange.upload is None
    for client, value in ((first, 5.0), (second, 7.0)):
        exchange.down(Visit(client.id, 1), client, STATE)
        update = exchange.up(Visit(client.id, 1), client, {"w": torch.tensor([value, 2.0])}, WORK)
        assert update.movement["w"].tolist() == [value - 1.0, 0.0]
        upload = exchange.upload
        assert (upload.round_idx, upload.client_id, upload.state["w"].tolist()) == (
            4,
            client.id,
            [value, 2.0],
        )
        assert upload.state["w"].dtype is torch.float32
        assert exchange.upload is upload
    exchange.start_round(5)
    assert exchange.upload is None


def test_of_controls_beside_the_parameters_the_upload_has_none():
    exchange, client = Exchange(Scaffold(), Identity(), seed=0), Client("a", 1, 1.0)
    received = exchange.down(Visit("a", 1), client, STATE)
    assert received.keys() == {"w", "control.w"}
    exchange.up(Visit("a", 1), client, {"w": torch.tensor([3.0, 3.0])}, WORK)
    assert {name: value.tolist() for name, value in exchange.upload.state.items()} == {"w": [3.0, 3.0]}


def test_in_a_visit_for_which_nothing_is_sent_the_client_still_has_what_it_received():
    class Twice(Algorithm):
        def send(self, visit, client, state):
            return state if visit.split == "first" else None

        def reply(self, visit, client, received, trained, work):
            return {} if visit.split == "first" else trained

        def finish_visit(self, visit, client, movement, work):
            return super().finish_visit(visit, client, movement, work) if movement else None

    exchange, client = Exchange(Twice(), Identity(), seed=0), Client("a", 1, 1.0)
    exchange.down(Visit("a", 1, "first"), client, STATE)
    assert exchange.up(Visit("a", 1, "first"), client, {"w": torch.zeros(2)}, WORK) is None
    assert exchange.upload is None
    (down, up), whole = exchange.num_bytes, Identity().down_bytes(STATE)
    assert (down, up) == (whole, 0)
    assert exchange.down(Visit("a", 1, "second"), client, {"w": torch.ones(2)}) is STATE
    exchange.up(Visit("a", 1, "second"), client, {"w": torch.tensor([2.0, 2.0])}, WORK)
    assert exchange.num_bytes == (0, whole)
    assert exchange.upload.state["w"].tolist() == [2.0, 2.0]
