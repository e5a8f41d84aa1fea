from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from fedlight.callbacks.loop.visits.visit import RankedExchange
from fedlight.federation.algorithm import Average, aggregation_of
from fedlight.federation.algorithms.lora.flexlora import HOLDS, FlexLoRA, best_factors, over_holders
from fedlight.federation.algorithms.lora.hetlora import HetLoRA
from fedlight.federation.client import Client, Identity, Visit, Work
from fedlight.federation.lora.products import Term, singular_vectors

A, B = "q.lora_A.weight", "q.lora_B.weight"
WORK = Work(num_steps=0, lr=0.0, mean_loss=None, seconds=0.0)
RANKS = {"a": 1, "b": 1, "c": 1, "d": 2}
VALUES = (3.0, 2.0)
"""Singular values of the product from which the clients start."""


def start():
    generator = torch.Generator().manual_seed(3)
    u, vt = (torch.linalg.qr(torch.randn(n, 2, generator=generator))[0] for n in (5, 6))
    return {A: vt.T.contiguous(), B: (u * torch.tensor(VALUES)).contiguous()}


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.lora_A, self.lora_B = nn.Linear(6, 2, bias=False), nn.Linear(2, 5, bias=False)


def federation():
    """What an algorithm asks of a run; the loop sets its state."""
    module = nn.ModuleDict({"q": Layer()})
    optimizers = [torch.optim.SGD(module.parameters(), lr=1.0)]
    return SimpleNamespace(
        module=module, optimizers=optimizers, robust=False, server=Average(), channel=Identity(), state={}
    )


def one_round(algorithm, run, state, ranks=RANKS, round_idx=0):
    """Return the state after a round in which nobody moves; aggregations are merged as those of two processes."""
    clients = [Client(name, 1, 1 / len(ranks), lora_rank=rank) for name, rank in ranks.items()]
    run.state = state
    exchange = RankedExchange(algorithm, Identity(), 0, round_idx, state, keeps_factors=True)
    parts = [aggregation_of(algorithm, len(clients)) for _ in range(2)]
    for number, client in enumerate(clients):
        visiting, _ = exchange.down(Visit(client.id, 1), client, None)
        update, _ = exchange.up(visiting, visiting.start, WORK)
        parts[number % 2].add(update)
    for piece in [*parts[1].pieces()]:
        parts[0].merge(piece)
    return Average().step(state, algorithm.finish_round(parts[0].result()))


def after(algorithm, rounds, ranks=RANKS):
    """Return the singular values after some rounds."""
    state, run = start(), federation()
    algorithm.check(run)
    for round_idx in range(rounds):
        state = one_round(algorithm, run, state, ranks, round_idx)
    return singular_vectors([Term(1.0, state[B].double(), state[A].double())])[1].tolist()


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
    algorithm, state = FlexLoRA(missing="skip"), start()
    algorithm.check(federation())
    whole = algorithm.start_visit(Visit("a", 1), Client("a", 1, 1.0), state)  # of the module's rank
    assert algorithm.finish_visit(whole, state, WORK).movement[HOLDS + A].tolist() == [1.0, 1.0]


def test_after_zero_padding_it_cannot_be_learned_again_and_after_flexlora_it_can():
    """A zero row of A together with a zero column of B has no gradient; FlexLoRA leaves the row of A."""
    for make, alive in ((HetLoRA, False), (FlexLoRA, True)):
        algorithm, run = make(), federation()
        algorithm.check(run)
        new = one_round(algorithm, run, start(), {"a": 1})
        assert new[B][:, 1].abs().max() < 1e-15  # weighted and divided again: the last bit may differ
        assert bool(new[A][1].abs().max() > 0.1) is alive


def factors(out, rank, inner, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator).double() for shape in ((out, rank), (rank, inner)))


@pytest.mark.parametrize("rank", [1, 2, 3, 4])
def test_the_first_columns_and_rows_are_the_nearest_product_of_that_rank(rank):
    b, a = factors(9, 6, 7, seed=1)
    own_b, own_a = best_factors([Term(2.0, b, a)], torch.zeros(4, 7))
    u, s, vt = np.linalg.svd((2 * b @ a).numpy())
    expected = (u[:, :rank] * s[:rank]) @ vt[:rank]
    np.testing.assert_allclose(own_b[:, :rank] @ own_a[:rank], expected, atol=1e-12)
    np.testing.assert_allclose(own_a @ own_a.T, np.eye(4), atol=1e-12)


def test_directions_without_a_singular_value_keep_their_rows_of_a():
    """A product of rank 2 in adapters of rank 4: the others have B = 0 and an A through which a gradient comes."""
    b, a = factors(9, 2, 7)
    spare = torch.arange(28.0).reshape(4, 7)
    own_b, own_a = best_factors([Term(1.0, b, a), Term(2.0, b, a.clone())], spare)
    np.testing.assert_allclose(own_b @ own_a, 3 * b @ a, atol=1e-12)
    assert not own_b[:, 2:].any()
    assert torch.equal(own_a[2:], spare[2:].double())
    zero_b, zero_a = best_factors([Term(1.0, torch.zeros(9, 2), a)], spare)
    assert not zero_b.any()
    assert torch.equal(zero_a, spare.double())


def test_each_direction_is_the_mean_over_those_that_have_it():
    """Clients of ranks 1 and 3 of weights 0.25 and 0.75, in adapters of rank 4, of which nobody has the last."""
    b, a = factors(5, 4, 6)
    (small_b, small_a), (large_b, large_a) = factors(5, 4, 6, seed=1), factors(5, 4, 6, seed=2)
    for value, rank in ((small_b.T, 1), (small_a, 1), (large_b.T, 3), (large_a, 3)):
        value[rank:] = 0
    terms = [Term(0.25, small_b, small_a), Term(0.75, large_b, large_a)]
    found = over_holders(terms, torch.tensor([1.0, 0.75, 0.75, 0.0]).double(), b, a)
    expected = 0.25 * small_b[:, :1] @ small_a[:1] + 0.75 * large_b[:, :1] @ large_a[:1]
    expected += large_b[:, 1:3] @ large_a[1:3] + b[:, 3:] @ a[3:]
    np.testing.assert_allclose(sum(one.coefficient * one.b @ one.a for one in found), expected, atol=1e-12)
