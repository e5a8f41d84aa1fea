import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism
from refusals import refusal

from fedlight.federation.client import Update, cohort_in_turn
from fedlight.federation.privacy import PrivateMean, gaussian_epsilon, root_coefficients

ROUNDS = 9


def banded(bands, rounds=ROUNDS):
    """Return the Toeplitz matrix C whose diagonals are the first coefficients of a root, ``(rounds, rounds)``."""
    series = [math.comb(2 * i, i) / 4**i for i in range(rounds)]  # of (1 - x) ** -0.5
    places = np.subtract.outer(np.arange(rounds), np.arange(rounds))
    return np.where((places >= 0) & (places < bands), np.array(series)[np.abs(places)], 0.0)


def drawn(mean, rounds=ROUNDS, sends=lambda round_idx: ("v", "w")):
    """Return the noise of each round, as a sum over one client that sends zeros, and the numbers behind it."""
    noises, numbers = [], []
    for round_idx in range(rounds):
        mean.add(Update("a", {name: torch.zeros(3, dtype=torch.float64) for name in sends(round_idx)}, 1.0))
        torch.manual_seed(round_idx)
        noises.append(mean.result())
        torch.manual_seed(round_idx)
        numbers.append({name: torch.randn(3, dtype=torch.float64) for name in ("v", "w")})
    return noises, numbers


def stacked(by_round, name):
    return np.stack([each[name].numpy() for each in by_round])


def test_the_square_of_the_root_is_the_prefix_sums():
    root = banded(ROUNDS)
    assert root @ root == pytest.approx(np.tril(np.ones((ROUNDS, ROUNDS))), abs=1e-12)
    assert root_coefficients(ROUNDS) == pytest.approx(root[:, 0])


@pytest.mark.parametrize("bands", [None, 1, 2, 4, ROUNDS, 2 * ROUNDS])
def test_the_noise_of_a_round_is_that_of_the_inverse_matrix(bands):
    """Without bands, of cohorts by lot, it is that of one band."""
    noises, numbers = drawn(PrivateMean(0.5, 3.0, bands=bands))
    for name in ("v", "w"):
        expected = 0.5 * 3.0 * np.linalg.inv(banded(bands or 1)) @ stacked(numbers, name)
        assert stacked(noises, name) == pytest.approx(expected, abs=1e-12)


def test_a_tensor_that_is_not_sent_has_its_noise_unseen():
    """RoLoRA sends one factor in a round: rounds of a client are as far apart for each as they are."""
    mean = PrivateMean(1.0, 1.0, bands=3)
    noises, numbers = drawn(mean, sends=lambda idx: ("v",) if idx in (0, 3, 5) else ("v", "w"))
    assert [set(each) for each in noises[:2]] == [{"v"}, {"v", "w"}]
    # Its matrix begins with the round that sends it for the first time.
    expected = np.linalg.inv(banded(3, ROUNDS - 1)) @ stacked(numbers[1:], "w")
    for noise, row in zip(noises[1:], expected, strict=True):
        if "w" in noise:
            assert noise["w"].numpy() == pytest.approx(row, abs=1e-12)


def test_a_round_without_clients_is_a_round():
    mean = PrivateMean(1.0, 1.0, bands=3)
    drawn(mean, 2)
    torch.manual_seed(7)
    assert mean.result() == {}
    before = {name: [*each] for name, each in mean.earlier.items()}
    assert [len(each) for each in before.values()] == [2, 2]
    mean.add(Update("a", {"v": torch.zeros(3, dtype=torch.float64)}, 1.0))
    torch.manual_seed(8)
    first = torch.randn(3, dtype=torch.float64)
    expected = first - 0.5 * before["v"][0] - 0.375 * before["v"][1]
    torch.manual_seed(8)
    assert torch.allclose(mean.result()["v"], expected)


def patterns(apart):
    """All sets of rounds of one client that are at least so far apart."""
    for size in range(1, ROUNDS + 1):
        for rounds in itertools.combinations(range(ROUNDS), size):
            if all(later - earlier >= apart for earlier, later in itertools.pairwise(rounds)):
                yield rounds


@pytest.mark.parametrize("bands", [1, 2, 3, 4])
def test_sensitivity_over_all_rounds_that_a_client_may_have(bands):
    """No movements of a client in k rounds, far enough apart, move C x by more than their norm times |c| sqrt(k)."""
    matrix, size = banded(bands), np.linalg.norm(root_coefficients(bands))
    largest = {}
    for rounds in patterns(bands):
        columns = matrix[:, rounds]
        signs = itertools.product([-1, 1], repeat=len(rounds))
        worst = max(np.linalg.norm(columns @ each) for each in signs)
        largest[len(rounds)] = max(worst, largest.get(len(rounds), 0))
    for times, moved in largest.items():
        assert moved <= size * math.sqrt(times) * (1 + 1e-12)
    assert largest[1] == pytest.approx(size)
    if bands > 1:  # rounds that are closer add up to more
        assert np.linalg.norm(matrix[:, [0, bands - 1]].sum(axis=1)) > 1.05 * size * math.sqrt(2)


@pytest.mark.parametrize(("bands", "times"), [(1, 3), (4, 1), (5, 6)])
def test_epsilon_is_that_of_dp_accounting(bands, times):
    """One Gaussian mechanism: C x + z, whose x moves by up to 2 S in each of a client's rounds."""
    mean = PrivateMean(0.5, 8.0, delta=1e-6, bands=bands)
    sensitivity = 2 * 0.5 * math.sqrt(times) * np.linalg.norm(banded(bands, 2 * bands)[:, 0])
    losses = from_gaussian_mechanism(8.0 * 0.5, sensitivity=sensitivity, value_discretization_interval=1e-5)
    assert mean.spent({(1, 1): times}) == pytest.approx(losses.get_epsilon_for_delta(1e-6), rel=1e-4)


def test_noise_for_an_epsilon():
    banded_mean, alone = (PrivateMean(1.0, epsilon=4.0, bands=bands) for bands in (6, 1))
    least, size = banded_mean.noise_for({(1, 1): 5}), np.linalg.norm(root_coefficients(6))
    assert least == pytest.approx(alone.noise_for({(1, 1): 5}) * size, rel=3e-4)
    banded_mean.noise = least
    assert 0.999 * 4 < banded_mean.spent({(1, 1): 5}) <= 4
    by_lot = PrivateMean(1.0, 2.0, secret_sampling=False)
    assert PrivateMean(1.0, 2.0, bands=1).spent({(1, 1): 5}) == by_lot.spent({(10, 50): 5})


def test_secret_noise_is_correlated_too():
    mean = PrivateMean(1.0, 1.0, bands=2)
    mean.keep_secret()
    noises = []
    for _ in range(2):
        mean.add(Update("a", {"v": torch.zeros(200_000, dtype=torch.float64)}, 1.0))
        torch.manual_seed(0)
        noises.append(mean.result()["v"].numpy())
    first, second = noises
    assert np.corrcoef(first, second)[0, 1] == pytest.approx(-0.5 / math.sqrt(1.25), abs=0.01)
    assert (second + 0.5 * first).std() == pytest.approx(1.0, abs=0.01)
    assert np.corrcoef(first, second + 0.5 * first)[0, 1] == pytest.approx(0, abs=0.01)


@pytest.mark.parametrize(("epsilon", "number"), [(1, 10), (8, 10), (1, 100), (8, 100)])
def test_the_noise_of_models_in_the_documentation(epsilon, number):
    page, rounds, errors = (Path(__file__).parents[2] / "docs/privacy.md").read_text(), 100, []
    for settings, k in (
        ({}, rounds),
        ({"secret_sampling": False}, rounds),
        ({"bands": 1}, rounds * number // 1000),
        ({"bands": 1000 // number}, rounds * number // 1000),
    ):
        mean = PrivateMean(1.0, epsilon=epsilon, **settings)
        sums = np.tril(np.ones((rounds, rounds))) @ np.linalg.inv(banded(settings.get("bands", 1), rounds))
        errors.append(mean.noise_for({(number, 1000): k}) * np.linalg.norm(sums) / math.sqrt(rounds))
    cells = " | ".join(f"{error:.1f}" if error < 100 else f"{error:.0f}" for error in errors)
    assert f"| {epsilon} | {number} | {cells} |" in page


@pytest.mark.parametrize(("clients", "number"), [(10, 3), (10, 5), (7, 7), (7, 1), (100, 9)])
def test_turns_of_clients(clients, number):
    rounds = 4 * clients
    names = [f"c{i}" for i in range(clients)]
    cohorts = [cohort_in_turn(names, number, 0, idx) for idx in range(rounds)]
    assert cohorts == [cohort_in_turn(names, number, 0, idx) for idx in reversed(range(rounds))][::-1]
    assert all(len({*each}) == number and each == sorted(each, key=names.index) for each in cohorts)
    for name in names:
        turns = [idx for idx, each in enumerate(cohorts) if name in each]
        between = {later - earlier for earlier, later in itertools.pairwise(turns)}
        assert between <= {clients // number, -(-clients // number)}
        assert len(turns) in {rounds * number // clients, -(-rounds * number // clients)}
    if number < clients:
        assert cohorts != [cohort_in_turn(names, number, 1, idx) for idx in range(rounds)]


def test_what_bands_refuse():
    with refusal("bands=0 must be at least 1"):
        PrivateMean(1.0, 1.0, bands=0)
    with refusal(r"bands=2 needs one clipping norm for all rounds: leave clip_quantile=0\.5 out"):
        PrivateMean(1.0, 1.0, clip_quantile=0.5, bands=2)
    in_turn = PrivateMean(1.0, 2.0, bands=1, secret_sampling=True)
    assert in_turn.spent({(1, 1): 3}) == gaussian_epsilon(2.0, 1e-5, 3)
