"""Rank collapse by itself: clients that learn nothing shrink what few of them have, unless means are over those that have it."""

import pytest
import torch

from fedlight.callbacks.loop.visit import Exchange
from fedlight.federation.algorithms.lora.flexlora import FlexLoRA
from fedlight.federation.algorithms.lora.hetlora import HetLoRA
from fedlight.federation.channel import Identity
from fedlight.federation.client import Client, Visit, Work
from fedlight.federation.lora.svd import product_svd
from fedlight.federation.server import Average

A, B = "q.lora_A.default.weight", "q.lora_B.default.weight"
WORK = Work(num_steps=0, lr=0.0, mean_loss=None, seconds=0.0)
RANKS = {"a": 1, "b": 1, "c": 1, "d": 2}
VALUES = (3.0, 2.0)
"""Singular values of the product from which the clients start."""


def start():
    generator = torch.Generator().manual_seed(3)
    u, vt = (torch.linalg.qr(torch.randn(n, 2, generator=generator))[0] for n in (5, 6))
    return {A: vt.T.contiguous(), B: (u * torch.tensor(VALUES)).contiguous()}


def after(algorithm, rounds, ranks=RANKS):
    """Return the singular values after rounds in which nobody moves; aggregations are merged as those of two processes."""
    state = start()
    clients = [Client(name, 1, 1 / len(ranks), lora_rank=rank) for name, rank in ranks.items()]
    for round_idx in range(rounds):
        exchange = Exchange(algorithm, Identity(), 0, round_idx, state)
        parts = [algorithm.aggregation(len(clients)) for _ in range(2)]
        for number, client in enumerate(clients):
            visiting, _ = exchange.down(Visit(client.id, 1), client, None)
            update, _ = exchange.up(visiting, visiting.start, WORK)
            parts[number % 2].add(update)
        for piece in [*parts[1].pieces()]:
            parts[0].merge(piece)
        state = Average().step(state, algorithm.finish_round(parts[0].result()))
    return product_svd(state[B], state[A])[1].tolist()


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize(
    ("make", "factor"),
    [
        (lambda: HetLoRA(sparsity_weighted=False), 1 / 16),  # A and B shrink to a quarter each
        (lambda: FlexLoRA(), 1 / 4),  # their product does
        (lambda: HetLoRA(sparsity_weighted=False, missing="skip"), 1.0),
        (lambda: HetLoRA(missing="skip"), 1.0),
        (lambda: FlexLoRA(missing="skip"), 1.0),
    ],
)
def test_what_one_of_four_clients_has_shrinks_by_its_share_in_each_round(make, factor, rounds):
    first, second = after(make(), rounds)
    assert first == pytest.approx(VALUES[0], rel=1e-5)
    assert second == pytest.approx(VALUES[1] * factor**rounds, rel=1e-5)


def test_weights_by_the_size_of_products_slow_it_and_do_not_stop_it():
    """The client of rank 2 has a product of norm sqrt(13), the others one of norm 3."""
    share = 13**0.5 / (13**0.5 + 9)
    assert after(HetLoRA(), 1)[1] == pytest.approx(VALUES[1] * share**2, rel=1e-5)


def test_what_nobody_of_a_round_has_is_gone_or_stays():
    for make in (HetLoRA, FlexLoRA):
        assert after(make(), 1, {"a": 1, "b": 1})[1] == pytest.approx(0.0, abs=1e-6)
        assert after(make(missing="skip"), 1, {"a": 1, "b": 1}) == pytest.approx(VALUES, rel=1e-5)


def test_after_zero_padding_it_cannot_be_learned_again_and_after_flexlora_it_can():
    """A zero row of A together with a zero column of B has no gradient; FlexLoRA leaves the row of A."""
    for make, alive in ((HetLoRA, False), (FlexLoRA, True)):
        algorithm, state = make(), start()
        exchange = Exchange(algorithm, Identity(), 0, 0, state)
        visiting, _ = exchange.down(Visit("a", 1), Client("a", 1, 1.0, lora_rank=1), None)
        aggregation = algorithm.aggregation(1)
        aggregation.add(exchange.up(visiting, visiting.start, WORK)[0])
        new = Average().step(state, algorithm.finish_round(aggregation.result()))
        assert not new[B][:, 1].any()
        assert bool(new[A][1].any()) is alive


def test_clients_that_were_sent_unlike_states_are_refused():
    """New factors take the place of those that were sent, which have to be the same ones."""
    algorithm, aggregation = FlexLoRA(), FlexLoRA().aggregation(2)
    for name, state in (("a", start()), ("b", {n: v + 1 for n, v in start().items()})):
        exchange = Exchange(algorithm, Identity(), 0, 0, state)
        visiting, _ = exchange.down(Visit(name, 1), Client(name, 1, 0.5, lora_rank=1), None)
        update, _ = exchange.up(visiting, visiting.start, WORK)
        if name == "a":
            aggregation.add(update)
        else:
            with pytest.raises(ValueError, match="two were sent unlike"):
                aggregation.add(update)
