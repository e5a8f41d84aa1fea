import copy
import random

import numpy as np
import pytest
import torch

from fedlight import CoordinateMedian, FedAvg, Update
from fedlight.federation.algorithm import WeightedSum, aggregation_of
from fedlight.federation.algorithms.lora.product_average import ProductAverage, new_factors
from fedlight.federation.lora import find_pairs
from fedlight.federation.lora.products import (
    ProductSums,
    Term,
    singular_vectors,
    squared_distance,
    with_factors,
)

SIZES = {"tall": (40, 30, 3, 4), "wide": (5, 30, 3, 4), "small": (5, 6, 3, 4), "one": (1, 6, 2, 3)}
"""Rows, columns, rank, number of terms: more and fewer stacked columns than rows."""


def some_terms(out, into, rank, number, seed=0):
    made = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=made, dtype=torch.float64)

    return [Term(float(normal(())), normal(out, rank), normal(rank, into)) for _ in range(number)]


def dense(terms):
    return sum(one.coefficient * one.b @ one.a for one in terms)


@pytest.mark.parametrize("size", SIZES)
def test_a_distance_is_that_of_the_matrices_multiplied_out(size):
    terms = some_terms(*SIZES[size])
    _, b, a = some_terms(*SIZES[size], seed=1)[0]
    distance, norm = squared_distance(terms, b, a)
    assert distance == pytest.approx(float((dense(terms) - b @ a).square().sum()), rel=1e-12)
    assert norm == pytest.approx(float(dense(terms).square().sum()), rel=1e-12)


@pytest.mark.parametrize("shared", ["a", "b"])
def test_terms_that_share_a_factor_are_as_far_as_multiplied_out(shared):
    first, *others = some_terms(20, 10, 2, 5)
    terms = [first, *(one._replace(**{shared: getattr(first, shared).clone()}) for one in others)]
    total = sum(one.coefficient * getattr(one, "b" if shared == "a" else "a") for one in terms)
    b, a = (total, first.a) if shared == "a" else (first.b, total)
    distance, norm = squared_distance(terms, b, a)
    assert norm == pytest.approx(float(dense(terms).square().sum()), rel=1e-12)
    assert distance < 1e-28 * norm


def test_a_small_distance_between_large_products_keeps_its_digits():
    """Inner products of the products themselves would lose all below the root of the rounding."""
    terms = some_terms(30, 20, 2, 3)
    b, a = (torch.cat([c * b for c, b, _ in terms], dim=1), torch.cat([a for *_, a in terms]))
    b[0, 0] += 1e-11
    distance, norm = squared_distance(terms, b, a)
    assert distance == pytest.approx(1e-22 * float(a[0].square().sum()), rel=1e-2)
    assert norm > 10


@pytest.mark.parametrize("size", SIZES)
def test_singular_vectors_are_those_of_the_matrix_multiplied_out(size):
    terms = some_terms(*SIZES[size])
    u, s, v = singular_vectors(terms)
    matrix = dense(terms).numpy()
    count = min(matrix.shape)
    expected = np.linalg.svd(matrix, compute_uv=False)[: len(s)]
    np.testing.assert_allclose(s.numpy()[:count], expected, atol=1e-12)
    np.testing.assert_allclose((u * s @ v).numpy(), matrix, atol=1e-12)
    kept = int((s > 1e-9).sum())
    np.testing.assert_allclose((u.T @ u)[:kept, :kept], np.eye(kept), atol=1e-12)
    np.testing.assert_allclose((v @ v.T)[:kept, :kept], np.eye(kept), atol=1e-12)
    assert all(row[row.abs().argmax()] > 0 for row in v)


def state_of(seed, ranks=(2, 3), sizes=((4, 5), (6, 3))):
    made = torch.Generator().manual_seed(seed)
    state = {}
    for number, (rank, (out, into)) in enumerate(zip(ranks, sizes, strict=True)):
        state[f"l{number}.lora_A.default.weight"] = torch.randn(rank, into, generator=made)
        state[f"l{number}.lora_B.default.weight"] = torch.randn(out, rank, generator=made)
    return state | {"head.weight": torch.randn(2, 2, generator=made)}


def update_of(client, weight, received, trained, state=None):
    movement = {name: trained[name].double() - received[name].double() for name in trained}
    made = Update(client, movement, weight)
    return with_factors(made, received, trained, state or received)


CLIENTS = {"a": 0.5, "b": 0.125, "c": 0.375}
NUMBER = 10


def sums_of(weighting, clients=CLIENTS, names=None):
    state = state_of(0)
    pairs = find_pairs(state).pairs
    mean = aggregation_of(FedAvg(weighting), NUMBER)
    sums = ProductSums(copy.deepcopy(mean), mean, pairs)
    for number, (client, share) in enumerate(clients.items()):
        trained = {n: value for n, value in state_of(1 + number).items() if names is None or n in names}
        sums.add(update_of(client, 1.0 if weighting == "uniform" else share, state, trained))
    return sums, state, pairs


@pytest.mark.parametrize("weighting", ["unbiased", "normalized", "uniform"])
def test_the_mean_product_is_in_movement_form_with_the_weights_of_the_aggregation(weighting):
    sums, state, pairs = sums_of(weighting)
    weights = {
        "unbiased": [NUMBER / 3 * share for share in CLIENTS.values()],
        "normalized": [share / sum(CLIENTS.values()) for share in CLIENTS.values()],
        "uniform": [1 / 3] * 3,
    }[weighting]
    for pair in pairs:
        own = pair.product(state)
        expected = own + sum(w * (pair.product(state_of(1 + i)) - own) for i, w in enumerate(weights))
        np.testing.assert_allclose(dense(sums.terms(pair, state)), expected, atol=1e-12)
    assert len(sums.terms(pairs[0], state)) == (4 if weighting == "unbiased" else 3)
    weighted = aggregation_of(FedAvg(weighting), NUMBER)
    for number, (client, share) in enumerate(CLIENTS.items()):
        trained = state_of(1 + number)
        weighted.add(update_of(client, 1.0 if weighting == "uniform" else share, state, trained))
    found, expected = sums.result(), weighted.result()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


def test_a_factor_that_nobody_sent_is_the_servers():
    names = {"l0.lora_B.default.weight", "l1.lora_B.default.weight"}
    sums, state, pairs = sums_of("normalized", names=names)
    for pair in pairs:
        shares = CLIENTS.values()
        mean = sum(share * state_of(1 + i)[pair.b].double() for i, share in enumerate(shares))
        np.testing.assert_allclose(dense(sums.terms(pair, state)), mean @ state[pair.a].double(), atol=1e-12)


def test_factors_of_which_some_clients_sent_one_and_others_both_have_no_mean_product():
    state = state_of(0)
    pairs = find_pairs(state).pairs
    sums = ProductSums(WeightedSum("weight"), WeightedSum("weight"), pairs)
    assert sums.terms(pairs[0], state) == []
    sums.add(update_of("a", 1.0, state, state_of(1)))
    sums.add(update_of("b", 1.0, state, {pairs[0].b: state_of(2)[pairs[0].b]}))
    assert sums.terms(pairs[0], state) is None
    assert len(sums.terms(pairs[1], state)) == 1


def test_smaller_ranks_are_products_of_the_slices():
    state = state_of(0)
    pairs = find_pairs(state).pairs
    sums = ProductSums(WeightedSum("weight"), WeightedSum("weight"), pairs[:1])
    small = {pairs[0].a: state[pairs[0].a][:1], pairs[0].b: state[pairs[0].b][:, :1]}
    sums.add(update_of("a", 1.0, small, {name: value + 1 for name, value in small.items()}))
    expected = (small[pairs[0].b] + 1).double() @ (small[pairs[0].a] + 1).double()
    np.testing.assert_allclose(dense(sums.terms(pairs[0], state)), expected, atol=1e-12)


def bits(sums, state, pairs):
    terms = [term for pair in pairs for term in sums.terms(pair, state)]
    return [[term.b.tolist(), term.a.tolist(), term.coefficient] for term in terms]


def test_neither_the_order_of_clients_nor_parts_of_a_round_change_a_bit():
    whole, state, pairs = sums_of("unbiased")
    expected, result = bits(whole, state, pairs), whole.result()
    names = [*CLIENTS]
    for seed in range(4):
        random.Random(seed).shuffle(names)
        mean = aggregation_of(FedAvg(), NUMBER)
        parts = [ProductSums(aggregation_of(FedAvg(), NUMBER), mean, pairs) for _ in range(2)]
        for number, name in enumerate(names):
            trained = state_of(1 + [*CLIENTS].index(name))
            parts[number % 2].add(update_of(name, CLIENTS[name], state, trained))
        together = ProductSums(aggregation_of(FedAvg(), NUMBER), mean, pairs)
        for part in reversed(parts):
            for piece in part.pieces() if seed % 2 else [part.partial()]:
                together.merge(piece)
        assert bits(together, state, pairs) == expected
        found = together.result()
        assert all(torch.equal(value, found[name]) for name, value in result.items())
        assert all(part.terms(pairs[0], state) == [] for part in parts)  # they started anew


def test_what_wraps_an_aggregation_without_pieces_of_its_own_gives_its_result():
    state = state_of(0)
    pairs = find_pairs(state).pairs
    median = ProductSums(CoordinateMedian(), WeightedSum("weight"), pairs)
    other = ProductSums(CoordinateMedian(), WeightedSum("weight"), pairs)
    for number, name in enumerate("abc"):
        (median if number else other).add(update_of(name, 1.0, state, state_of(1 + number)))
    for piece in other.pieces():
        median.merge(piece)
    middle = torch.stack([state_of(1 + i)["head.weight"].double() for i in range(3)]).median(dim=0).values
    np.testing.assert_allclose(median.result()["head.weight"] + state["head.weight"], middle, atol=1e-12)


def test_a_factor_of_a_clients_own_is_known_by_its_value_and_merged():
    state = state_of(0)
    pairs = find_pairs(state).pairs
    a_alone = {pairs[0].a: state_of(1)[pairs[0].a]}
    sent = Update("a", {pairs[0].a: a_alone[pairs[0].a].double() - state[pairs[0].a].double()}, 1.0)
    same, other = ({pairs[0].b: state[pairs[0].b] + number} for number in (0, 1))
    assert not with_factors(sent, state, a_alone | same, state).keeps_factors
    assert with_factors(sent, state, a_alone | other, state).keeps_factors
    head = {"head.weight": torch.ones(2, 2)}  # none of LoRA's
    assert not with_factors(Update("a", {}, 1.0), {}, head, state).keeps_factors
    sums, elsewhere = (ProductSums(WeightedSum("one"), WeightedSum("one"), pairs) for _ in range(2))
    elsewhere.add(with_factors(sent, state, a_alone | other, state))
    for piece in elsewhere.pieces():
        sums.merge(piece)
    assert not sums.is_known
    assert elsewhere.is_known


def test_new_factors_are_the_best_of_their_rank():
    """Eckart and Young, 1936: what is cut off has the norm of the singular values that are left out."""
    terms, a = some_terms(12, 10, 3, 4), torch.randn(3, 10, dtype=torch.float64)
    b, new_a = new_factors(terms, a, 1.0)
    s = np.linalg.svd(dense(terms).numpy(), compute_uv=False)
    assert tuple(b.shape) == (12, 3)
    cut = float((dense(terms) - b @ new_a).norm())
    assert cut == pytest.approx(float(np.sqrt((s[3:] ** 2).sum())), rel=1e-10)


@pytest.mark.parametrize("threshold", [0.3, 0.7, 0.9, 0.999])
def test_the_threshold_is_a_share_of_the_squared_singular_values(threshold):
    terms, a = some_terms(12, 10, 3, 2), torch.randn(6, 10, dtype=torch.float64)
    s = np.linalg.svd(dense(terms).numpy(), compute_uv=False) ** 2
    rank = next(p for p in range(1, 7) if s[:p].sum() / s.sum() >= threshold)
    b, new_a = new_factors(terms, a, threshold)
    assert (b.shape[1], new_a.shape[0]) == (rank, rank)


def test_a_keeps_its_size_and_its_rows_are_orthogonal():
    terms, a = some_terms(12, 10, 3, 4), torch.randn(3, 10, dtype=torch.float64)
    _, new_a = new_factors(terms, a, 1.0)
    size = float(a.square().sum() / 3)
    np.testing.assert_allclose(new_a @ new_a.T, size * np.eye(3), atol=1e-10)
    in_use = torch.cat([a, torch.zeros(2, 10)])  # rows that a threshold has cut
    _, more = new_factors(terms, in_use, 1.0)
    np.testing.assert_allclose(more.norm(dim=1) ** 2, size, rtol=1e-10)


def test_rows_without_a_singular_value_go_on_with_what_is_left_of_the_old_a():
    terms, a = some_terms(12, 10, 1, 1), torch.randn(3, 10, dtype=torch.float64)
    b, new_a = new_factors(terms, a, 1.0)
    np.testing.assert_allclose(b @ new_a, dense(terms), atol=1e-12)
    assert b[:, 1:].count_nonzero() == 0
    assert torch.linalg.matrix_rank(new_a) == 3
    # The free rows lie in the rows of the old A and of the product.
    assert torch.linalg.matrix_rank(torch.cat([new_a, a, terms[0].a])) == 4
    b, new_a = new_factors(terms, a, 0.9)  # a threshold cuts them
    assert (b.shape[1], new_a.shape[0]) == (1, 1)
    assert new_factors([terms[0]._replace(b=torch.zeros(12, 1).double())], a, 1.0) is None  # of nothing


@pytest.mark.parametrize("threshold", [0, -0.5, 1.5, float("nan")])
def test_a_threshold_that_is_no_share_is_refused(threshold):
    with pytest.raises(ValueError, match=r"threshold=.*, a share of the squared singular values, must be in"):
        ProductAverage(threshold)
