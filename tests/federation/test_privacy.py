import copy
import itertools
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from plain_lightning import assert_equal, federate, module, weights
from refusals import refusal
from scipy.optimize import brentq
from scipy.stats import chisquare, kstest, norm
from updates import result, update

from fedlight import FedAvg, Limits, Quantize, Scaffold, TopK, Wire
from fedlight.callbacks.loop.parts import ProductError
from fedlight.federation import privacy
from fedlight.federation.client import Client, Diverged, Update
from fedlight.federation.privacy import (
    LEAST_UNITS,
    ClipAndNoise,
    PrivateMean,
    concentrated_epsilon,
    discrete_normal,
    gaussian_epsilon,
    sampled_epsilon,
    secret_normal,
    secret_uniform,
)

DELTA = 1e-4


def test_mean_of_clipped_movements_by_hand():
    """Norms over all tensors: 13 is cut to 6.5, 5 is left; weights do not count; each tensor over its senders."""
    mean = PrivateMean(clip_norm=6.5, noise_multiplier=0.0)
    updates = update("a", 9.0, v=[3.0, 4.0], w=[12.0]), update("b", v=[4.0, -3.0]), update("c", w=[0.0])
    for each in (updates, updates[::-1]):  # and the round before is forgotten
        assert result(mean, *each) == {"v": [2.75, -0.5], "w": [3.0]}
    assert result(mean) == {}


def test_noise_of_a_mean():
    """Standard deviation z S / n, with n those that sent the tensor; over 200,000 values it is known within 1 %."""
    torch.manual_seed(0)
    mean = PrivateMean(clip_norm=0.5, noise_multiplier=3.0)
    zeros = torch.zeros(200_000, dtype=torch.float64)
    for name in "abc":
        mean.add(Update(name, {"v": zeros} | ({"w": zeros} if name == "a" else {}), 1.0))
    noise = mean.result()
    assert noise["v"].std().item() == pytest.approx(3.0 * 0.5 / 3, rel=0.01)
    assert noise["w"].std().item() == pytest.approx(3.0 * 0.5 / 1, rel=0.01)
    assert abs(np.corrcoef(noise["v"], noise["w"])[0, 1]) < 0.01
    assert noise["v"].mean().abs() < 0.005


def test_noise_of_a_mean_comes_from_the_global_stream():
    def drawn(*order):
        torch.manual_seed(5)
        return result(PrivateMean(1.0, 1.0), *(update("a", **{name: [0.0] for name in order}),))

    assert drawn("v", "w") == drawn("w", "v")
    assert drawn("v", "w")["v"] != drawn("v", "w")["w"]


def test_clip_and_noise():
    torch.manual_seed(0)
    values = torch.full((200_000,), 2.0)
    sent, side = ClipAndNoise(clip_norm=3.0, noise_multiplier=0.5).encode(values, [200_000])
    clipped = 3.0 / math.sqrt(200_000)
    assert side == {}
    assert (sent - clipped).std().item() == pytest.approx(0.5 * 3.0, rel=0.01)
    assert (sent - clipped).mean().abs() < 0.02
    small = torch.tensor([0.3, 0.4])
    assert torch.equal(ClipAndNoise(0.51, 0.0).encode(small, [2])[0], small)
    assert torch.equal(ClipAndNoise(0.51, 0.0).encode(torch.zeros(2), [2])[0], torch.zeros(2))
    # over the wire all tensors together
    zero = {"v": torch.zeros(2), "w": torch.zeros(1)}
    trained = {"v": torch.tensor([3.0, 4.0]), "w": torch.tensor([12.0])}
    wire = Wire(up=[ClipAndNoise(6.5, 0.0), TopK(1.0, error_feedback=False)])
    payload = wire.up(zero, trained, Client("c", 1, 1.0))
    assert {name: value.tolist() for name, value in payload.state.items()} == {"v": [1.5, 2.0], "w": [6.0]}


@pytest.mark.parametrize("times", [1, 7])
@pytest.mark.parametrize("noise_multiplier", [0.7, 2.0, 30.0])
def test_epsilon_without_sampling(noise_multiplier, times):
    """The privacy curve of Balle and Wang; a client's movement turns from +S to -S, so the sensitivity is 2 S."""
    sigma = noise_multiplier / 2 / math.sqrt(times)

    def delta(epsilon):
        first, second = 1 / (2 * sigma) - epsilon * sigma, -1 / (2 * sigma) - epsilon * sigma
        return norm.cdf(first) - math.exp(epsilon + norm.logcdf(second))

    expected = brentq(lambda epsilon: delta(epsilon) - DELTA, 0, 700) if delta(0) > DELTA else 0.0
    assert gaussian_epsilon(noise_multiplier, DELTA, times) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("noise_multiplier", [1.0, 2.0, 5.0])
@pytest.mark.parametrize("share", [(1, 10), (2, 10), (9, 10)])
def test_epsilon_with_sampling(noise_multiplier, share):
    """What one round leaks when all are at -S and one client, if sampled, turns the sum by 2 S: the bound is reached."""
    q = share[0] / share[1]
    x = np.linspace(-15 * noise_multiplier, 15 * noise_multiplier, 200_001)
    before = norm.pdf(x, 0, noise_multiplier)
    after = (1 - q) * before + q * norm.pdf(x, 2, noise_multiplier)

    def delta(epsilon):
        return np.clip(after - math.exp(epsilon) * before, 0, None).sum() * (x[1] - x[0])

    leaked = brentq(lambda epsilon: delta(epsilon) - DELTA, 0, 50)
    said = sampled_epsilon(noise_multiplier, DELTA, [share])
    assert leaked <= said < 1.0002 * leaked
    assert said <= gaussian_epsilon(noise_multiplier, DELTA, 1)  # equal where nearly all are sampled
    assert sampled_epsilon(2 * noise_multiplier, DELTA, [share]) < leaked  # what a sensitivity of S would say


def composed(noise_multiplier, q, times, step, up):
    """Epsilon after equal rounds, from losses put on a grid of this step, all upwards or all downwards.

    Losses above 0 are those of ((1 - q) Q + q P, Q), losses below 0 those of (Q, (1 - q) Q + q P), and the rest is at 0.
    """
    s = noise_multiplier / 2
    edges = np.linspace(-40 * s, 40 * s + 1, 2_000_001)
    x = (edges[1:] + edges[:-1]) / 2
    mass_q, mass_p = np.diff(norm.cdf(edges, 0, s)), np.diff(norm.cdf(edges, 1, s))
    loss = np.log1p(q * np.expm1((2 * x - 1) / (2 * s * s)))
    mixed = (1 - q) * mass_q + q * mass_p
    losses = np.concatenate([loss[loss > 0], -loss[loss > 0]])
    weights = np.concatenate([mixed[loss > 0], mass_q[loss > 0]])
    places = (np.ceil if up else np.floor)(losses / step).astype(int)
    size = 1 << 20
    pmf = np.bincount(places % size, weights, minlength=size)
    pmf[0] += 1 - pmf.sum()
    total = np.fft.irfft(np.fft.rfft(pmf) ** times, size)
    grid = np.fft.fftfreq(size, 1 / (size * step))  # losses below 0 come last

    def delta(epsilon):
        return (total * -np.expm1(np.minimum(epsilon - grid, 0))).sum()

    return brentq(lambda epsilon: delta(epsilon) - DELTA, 0, 50)


@pytest.mark.parametrize(
    ("noise_multiplier", "share", "times"), [(2.0, (10, 1000), 100), (4.0, (1, 10), 20), (1.0, (1, 50), 5)]
)
def test_epsilon_with_sampling_over_rounds(noise_multiplier, share, times):
    """A loss rounded upwards says too much and one rounded downwards too little; the bound lies between them."""
    q = share[0] / share[1]
    least, most = (composed(noise_multiplier, q, times, 1e-4, up) for up in (False, True))
    said = sampled_epsilon(noise_multiplier, DELTA, [share] * times)
    assert least < said < most < 1.05 * least


@pytest.mark.parametrize("noise_multiplier", [0.7, 2.0])
def test_no_data_leak_more_than_epsilon_with_sampling(noise_multiplier):
    """All cohorts of 2 of 4 clients with movements in [-1, 1], written out; a client's movement is replaced."""
    random = np.random.default_rng(0)
    x = np.linspace(-12, 12, 4001)
    said = sampled_epsilon(noise_multiplier, DELTA, [(2, 4)])

    def density(movements):
        sums = [sum(cohort) for cohort in itertools.combinations(movements, 2)]
        return np.mean([norm.pdf(x, each, noise_multiplier) for each in sums], axis=0)

    leaks = []
    worst = [(-1.0, 1.0, -1.0, -1.0, -1.0), (1.0, -1.0, -1.0, 1.0, 1.0)]
    drawn = [*random.uniform(-1, 1, (100, 5)), *random.choice([-1.0, 1.0], (100, 5))]
    for first, other, *rest in [*worst, *drawn]:
        here, there = density([first, *rest]), density([other, *rest])
        for a, b in ((here, there), (there, here)):
            leaks.append(np.clip(a - math.exp(said) * b, 0, None).sum() * (x[1] - x[0]))
    assert max(leaks) <= DELTA
    assert max(leaks) > 0.99 * DELTA  # of all at -1 and one client that turns


@pytest.mark.parametrize(("noise_multiplier", "times"), [(2.0, 100), (20.0, 1000), (100.0, 10_000)])
@pytest.mark.parametrize("delta", [1e-3, 1e-6, 1e-9])
def test_rounding_never_lowers_epsilon(noise_multiplier, times, delta):
    """Nearly all clients are sampled, so the exact epsilon without sampling is nearly reached."""
    exact = gaussian_epsilon(noise_multiplier, delta, times)
    said = sampled_epsilon(noise_multiplier, delta, [(10**9 - 1, 10**9)] * times)
    assert 0.9999 * exact < said <= exact
    losses = privacy._losses(noise_multiplier, 1.0, privacy._grid(noise_multiplier, 1.0)[1])
    composed_losses = losses.self_compose(times).get_epsilon_for_delta(delta - privacy.ROUNDING * times)
    assert exact <= composed_losses < 1.005 * exact


def test_epsilon_where_the_grid_is_too_coarse():
    """Losses of a round are in the millions, or delta is as small as rounding errors: the bound without sampling holds.

    So it does without rounds, and without noise.
    """
    assert sampled_epsilon(1.0, DELTA, []) == gaussian_epsilon(1.0, DELTA, 0) == 0.0
    assert sampled_epsilon(0.0, DELTA, [(1, 2)]) == gaussian_epsilon(0.0, DELTA, 1) == math.inf
    with refusal("noise_multiplier=nan must be in"):
        sampled_epsilon(math.nan, DELTA, [(1, 2)])
    assert sampled_epsilon(1e-3, DELTA, [(1, 100)]) == gaussian_epsilon(1e-3, DELTA, 1)
    assert sampled_epsilon(2.0, 1e-13, [(1, 100)] * 10) == gaussian_epsilon(2.0, 1e-13, 10)


def test_epsilon_adds_up_over_rounds():
    few, many = [(5, 100)] * 10, [(5, 100)] * 40
    mixed = [(5, 100), (10, 100)] * 5
    assert sampled_epsilon(2.0, DELTA, few) < sampled_epsilon(2.0, DELTA, many)
    assert sampled_epsilon(2.0, DELTA, few) < sampled_epsilon(2.0, DELTA, mixed)
    assert sampled_epsilon(2.0, DELTA, mixed) == sampled_epsilon(2.0, DELTA, mixed[::-1])
    assert sampled_epsilon(2.0, DELTA, [(7, 7)] * 3) == gaussian_epsilon(2.0, DELTA, 3)
    assert gaussian_epsilon(2.0, DELTA, 4) == pytest.approx(gaussian_epsilon(1.0, DELTA, 1))


def test_who_says_an_epsilon():
    rounds = [(5, 100)] * 3
    local = ClipAndNoise(1.0, 2.0, delta=DELTA)
    assert PrivateMean(1.0, 2.0, delta=DELTA).spent(rounds) == sampled_epsilon(2.0, DELTA, rounds)
    known = PrivateMean(1.0, 2.0, secret_sampling=False, delta=DELTA)
    assert known.spent(rounds) == local.spent(rounds) == gaussian_epsilon(2.0, DELTA, 3)
    assert Wire(up=[local, Quantize("int8")]).private is local
    assert Wire(up=Quantize("int8")).private is Wire().private is None


def test_without_the_accountant(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    for private in (PrivateMean(1.0, 1.0), ClipAndNoise(1.0, 1.0)):
        with pytest.raises(ModuleNotFoundError, match=r"pip install 'fedlight\[privacy\]'"):
            private.spent([])


@pytest.mark.parametrize("epsilon", [0.01, 1.0, 4.0, 200.0])
@pytest.mark.parametrize("secret_sampling", [True, False])
def test_noise_for_an_epsilon(epsilon, secret_sampling):
    """Not more than the epsilon, and hardly less."""
    mean, rounds = PrivateMean(1.0, None, secret_sampling, DELTA, epsilon), {(5, 100): 40}
    mean.noise = mean.noise_for(rounds)
    assert 0.999 * epsilon < mean.spent(rounds) <= epsilon
    local = ClipAndNoise(1.0, epsilon=epsilon, delta=DELTA)
    exact = brentq(lambda noise: gaussian_epsilon(noise, DELTA, 40) - epsilon, 1e-2, 1e5)
    assert local.noise_for(rounds) == pytest.approx(exact, rel=2e-4)
    assert mean.noise <= local.noise_for(rounds)
    assert mean.noise < local.noise_for(rounds) or not secret_sampling


def test_the_noise_of_epsilons_in_the_documentation():
    page = (Path(__file__).parents[2] / "docs/privacy.md").read_text()
    for epsilon in (1, 4, 8):
        mean = PrivateMean(1.0, epsilon=epsilon)
        few, many = (mean.noise_for({(sampled, 1000): 100}) for sampled in (10, 100))
        known = PrivateMean(1.0, epsilon=epsilon, secret_sampling=False).noise_for({(10, 1000): 100})
        assert f"| {epsilon} | {few:.2f} | {many:.2f} | {known:.1f} |" in page
    assert f"epsilon 4 takes {ClipAndNoise(1.0, epsilon=4.0).noise_for({(1, 1): 10}):.1f} if" in page
    shared = ClipAndNoise(1.0, epsilon=4.0, shared_by=2)
    one, ten, many = (shared.noise_for({(1, 1): times}) for times in (1, 10, 100))
    assert f"{one:.1f} for one round, {ten:.1f} for ten and {many:.1f} for a hundred" in page


def test_the_noise_of_an_epsilon_is_unknown_outside_of_a_run():
    mean = PrivateMean(1.0, epsilon=4.0)
    mean.add(update("a", w=[1.0]))
    for use in (mean.result, lambda: ClipAndNoise(1.0, epsilon=4.0).encode(torch.zeros(2), [2])):
        with refusal("a run sets the noise for epsilon=4"):
            use()


def test_a_clipping_norm_follows_a_quantile_by_hand():
    """Andrew et al., algorithm 1, without noise: C exp(-0.2 (b / n - gamma)), with b movements within C."""
    mean = PrivateMean(clip_norm=5.0, noise_multiplier=0.0, clip_quantile=0.25)
    first = update("a", v=[3.0, 4.0]), update("b", v=[6.0, 8.0]), update("c", v=[0.0, 0.0])
    assert result(mean, *first) == {"v": [2.0, 8 / 3]}
    norm_of_two = 5.0 * math.exp(-0.2 * (2 / 3 - 0.25))
    assert mean.norm == pytest.approx(norm_of_two, rel=1e-12)
    clipped = [0.6 * norm_of_two, 0.8 * norm_of_two]
    assert result(mean, update("b", v=[6.0, 8.0])) == {"v": pytest.approx(clipped)}
    assert mean.norm == pytest.approx(norm_of_two * math.exp(0.2 * 0.25), rel=1e-12)
    before = mean.norm
    assert result(mean) == {}
    assert mean.norm == before  # a round without clients says nothing
    assert mean.clip_norm == 5.0


def test_a_clipping_norm_is_the_same_of_parts_in_any_order():
    norms = []
    for cut in (0, 2, 4):
        mean, other = (PrivateMean(1.0, 0.7, clip_quantile=0.5) for _ in range(2))
        for place in range(5):
            (mean if place < cut else other).add(update(f"c{place}", v=[place / 2]))
        torch.manual_seed(0)
        mean.merge(other.partial())
        mean.result()
        norms.append(mean.norm)
    assert norms[0] == norms[1] == norms[2] != 1.0


def test_the_budget_is_shared_with_the_count_of_movements_within_the_norm():
    """A replaced client moves the sum by 2 S and the count by 1: together they are as far apart as 2 S under z S."""
    torch.manual_seed(0)
    sums, counts = [], []
    several = PrivateMean(0.5, 3.0, clip_quantile=0.5)
    for place in range(80):  # so many that the noised share stays between 0 and 1
        several.add(update(f"c{place}", v=[0.0 if place < 40 else 1.0] * 50))
    partial = several.partial()
    for _ in range(3000):
        mean = PrivateMean(0.5, 3.0, clip_quantile=0.5)
        mean.merge(copy.deepcopy(partial))
        sums.append(80 * mean.result()["v"].numpy())
        counts.append(80 * -math.log(mean.norm / 0.5) / 0.2)  # noise of the count
    sums = [each - np.mean(sums, axis=0) for each in sums]
    of_sum, of_count = np.std(sums), np.std(counts)
    assert of_sum == pytest.approx(0.5 * 3.0 / math.sqrt(1 - privacy.CLIP_SHARE), rel=0.01)
    assert (2 * 0.5 / of_sum) ** 2 + (1 / of_count) ** 2 == pytest.approx((2 / 3.0) ** 2, rel=0.02)
    assert abs(np.corrcoef([each[-1] for each in sums], counts)[0, 1]) < 0.06


def test_secret_noise_is_normal_and_no_seed_repeats_it():
    for size in (0, 1, 7):
        assert secret_normal(size).shape == (size,)
    codec = ClipAndNoise(clip_norm=3.0, noise_multiplier=0.5)
    codec.keep_secret()
    assert codec.encode(torch.zeros(200_000), [200_000])[0].std().item() == pytest.approx(0.5 * 3.0, rel=0.01)
    drawn = secret_normal(200_001).numpy()
    assert kstest(drawn, "norm").pvalue > 1e-6
    halves = drawn[:100_000], drawn[100_001:]  # cosines and sines of the same angles
    assert abs(np.corrcoef(*halves)[0, 1]) < 0.02
    assert abs(np.corrcoef(*np.square(halves))[0, 1]) < 0.02
    made = []
    for secret in (False, False, True, True):
        mean, codec = PrivateMean(1.0, 3.0), ClipAndNoise(1.0, 3.0)
        for private in (mean, codec) if secret else ():
            private.keep_secret()
        mean.add(update("a", w=[[0.0, 0.0]]))
        torch.manual_seed(5)
        noise = mean.result()["w"]
        assert noise.shape == (1, 2)
        sent, _ = codec.encode(torch.zeros(3), [3])
        assert (noise.dtype, sent.dtype) == (torch.float64, torch.float32)
        made.append((noise.tolist(), sent.tolist()))
    assert made[0] == made[1]
    assert (
        len({str(each) for place in (0, 1) for each in (made[0][place], made[2][place], made[3][place])}) == 6
    )


def test_a_second_update_of_a_client_is_refused():
    mean, other = PrivateMean(1.0, 1.0), PrivateMean(1.0, 1.0)
    mean.add(update("a", w=[1.0]))
    other.add(update("a", w=[1.0]))
    for again in (lambda: mean.add(update("a", w=[1.0])), lambda: mean.merge(other.partial())):
        with refusal("client 'a' sent a second update in one round"):
            again()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused(bad):
    with refusal("movement of client 'a' is not finite"):
        PrivateMean(1.0, 1.0).add(update("a", w=[1.0, bad]))
    with refusal("the movement is not finite"):
        ClipAndNoise(1.0, 1.0).encode(torch.tensor([1.0, bad]), [2])


@pytest.mark.parametrize("make", [PrivateMean, ClipAndNoise])
def test_ranges(make):
    ranges = {
        "clip_norm": ((0.0, -1.0, math.inf, math.nan), {"noise_multiplier": 1.0}),
        "noise_multiplier": ((-0.1, math.inf, math.nan), {"clip_norm": 1.0}),
        "delta": ((0.0, 1.0, -1e-5, math.nan), {"clip_norm": 1.0, "noise_multiplier": 1.0}),
        "epsilon": ((0.0, -1.0, math.inf, math.nan), {"clip_norm": 1.0}),
    }
    if make is PrivateMean:
        ranges["clip_quantile"] = (0.0, 1.0, -0.5, math.nan), {"clip_norm": 1.0, "noise_multiplier": 1.0}
    for name, (values, others) in ranges.items():
        for value in values:
            with refusal(f"{name}={value} "):
                make(**others, **{name: value})
    for noise_multiplier, epsilon in ((None, None), (1.0, 4.0)):
        with refusal(f"={noise_multiplier} and epsilon={epsilon}: give one of them"):
            make(1.0, noise_multiplier, epsilon=epsilon)
    with refusal("3 sampled clients out of 2"):
        sampled_epsilon(1.0, DELTA, [(3, 2)])
    with refusal("no noise for no rounds: raise trainer"):
        make(1.0, epsilon=4.0).noise_for({(10, 1000): 0})


def test_much_noise_on_few_clients_does_not_carry_the_clipping_norm_away():
    mean = PrivateMean(0.5, noise_multiplier=300.0, clip_quantile=0.5)
    torch.manual_seed(0)
    for _ in range(100):
        for client in "ab":
            mean.add(update(client, v=[0.2]))
        mean.result()
    assert 0.01 < mean.norm < 20


@pytest.mark.parametrize("deviation", [0.4, 3.0, 7.5])
def test_discrete_noise_has_the_probabilities_of_its_definition(deviation):
    size = 200_000
    found = discrete_normal(deviation, size, np.random.default_rng(0).random)
    assert np.array_equal(found, np.rint(found))
    reach = math.ceil(6 * deviation)
    weights = np.exp(-(np.arange(-reach, reach + 1) ** 2) / (2 * deviation**2))
    expected = size * weights / weights.sum()
    often = expected >= 5
    counts = np.bincount((found + reach).astype(int), minlength=2 * reach + 1)[often]
    assert chisquare(counts, expected[often] * counts.sum() / expected[often].sum()).pvalue > 1e-4


def test_wide_discrete_noise_is_normal():
    found = discrete_normal(1e6, 50_000, secret_uniform)
    assert kstest(found / 1e6, norm.cdf).pvalue > 1e-4
    assert not discrete_normal(0.0, 3, secret_uniform).any()


@pytest.mark.parametrize(("rho", "delta"), [(0.02, 1e-5), (0.5, 1e-5), (0.5, 1e-9), (20.0, 1e-6)])
def test_epsilon_of_concentrated_privacy_is_that_of_another_accountant(rho, delta):
    """A Gaussian mechanism of that rho has the same Renyi divergences; the other accountant has fewer orders."""
    from dp_accounting import GaussianDpEvent
    from dp_accounting.rdp import RdpAccountant

    other = RdpAccountant(orders=[1 + 10 ** (k / 200) for k in range(-600, 1200)])
    other.compose(GaussianDpEvent(1 / math.sqrt(2 * rho)))
    assert concentrated_epsilon(rho, delta) == pytest.approx(other.get_epsilon(delta), rel=1e-3)
    exact = gaussian_epsilon(2 / math.sqrt(2 * rho), delta, times=1)  # of noise that is no whole number
    assert exact < concentrated_epsilon(rho, delta) < 1.25 * exact


def test_shared_noise_adds_up_exactly():
    """Each client's part lies on one grid, its norm without noise is no larger, and the noise of all has its size."""
    values, clients = torch.randn(20_000, generator=torch.Generator().manual_seed(1)), 16
    quiet, noisy = (ClipAndNoise(0.5, noise, shared_by=clients) for noise in (0.0, 2.0))
    cut, _ = quiet.encode(values, [20_000])
    assert 0.4999 < cut.double().norm().item() <= 0.5
    noisy.keep_secret()
    parts = [noisy.encode(values, [20_000])[0] for _ in range(clients)]
    unit = 2.0 ** math.ceil(math.log2((0.5 + 12 * 2.0 * 0.5 / 4) / 2**23))
    assert all(torch.equal(part, (part / unit).round() * unit) for part in parts)
    noise = sum(part.double() for part in parts) - clients * cut.double()
    assert noise.std().item() == pytest.approx(2.0 * 0.5, rel=0.02)
    assert (parts[0] - cut).std().item() == pytest.approx(2.0 * 0.5 / 4, rel=0.02)
    assert not torch.equal(parts[0], parts[1])


def test_epsilon_of_shared_noise():
    shared = ClipAndNoise(1.0, 4.0, shared_by=10)
    assert shared.spent({(1, 1): 3}) == concentrated_epsilon(3 * 2 / 16, shared.delta)
    assert ClipAndNoise(1.0, 0.0, shared_by=10).spent({(1, 1): 1}) == math.inf
    needed = ClipAndNoise(1.0, epsilon=4.0, shared_by=10).noise_for({(1, 1): 10})
    assert concentrated_epsilon(10 * 2 / needed**2, privacy.DELTA) == pytest.approx(4.0, rel=1e-3)
    with refusal(r"noise_multiplier=0\.01 shared by 10,000,000 clients is too little"):
        ClipAndNoise(1.0, 0.01, shared_by=10_000_000).encode(torch.ones(3), [3])
    assert LEAST_UNITS >= 64  # the term of theorem 1 that is left out: exp(-pi^2 * LEAST_UNITS^2)
    with refusal("shared_by=0 is a number of clients"):
        ClipAndNoise(1.0, 1.0, shared_by=0)


def share(algorithm=None, clients=3, further=(), **loop):
    """Run a federation of ten clients, three in a round, with shared noise."""
    channel = Wire(up=[ClipAndNoise(0.5, 8.0, delta=0.01, shared_by=clients), *further])
    return federate(algorithm=algorithm or FedAvg("uniform"), channel=channel, **loop)


def test_a_round_of_fewer_than_share_the_noise_moves_nothing(monkeypatch, caplog):
    """A run with all of them moves, and counts towards who sees sums."""
    start, (whole, loop) = weights(module()), share()
    assert not torch.equal(weights(whole)["net.0.weight"], start["net.0.weight"])
    spent = loop.privacy.after([], 10)
    assert spent["epsilon_sum"] == concentrated_epsilon(max(loop.privacy.asked.values()) * 2 / 64, 0.01)
    assert "epsilon_local" not in spent
    encode, clients = ClipAndNoise.encode, iter(range(3))

    def broken(codec, values, sizes):
        if next(clients) == 0:
            raise Diverged("of this client")
        return encode(codec, values, sizes)

    monkeypatch.setattr(ClipAndNoise, "encode", broken)
    assert_equal(weights(share(rounds=1)[0]), start)
    assert "round 1 had 2 of the 3 clients that share the noise, so it moves nothing" in caplog.text


def test_clients_over_a_limit_that_count_all_the_same_share_the_noise(caplog):
    moved, loop = share(rounds=1, limits=Limits(norm=1.0))
    assert "large_norm" in {row["reason"] for row in loop.visit_records}
    assert not torch.equal(weights(moved)["net.0.weight"], weights(module())["net.0.weight"])
    assert "moves nothing" not in caplog.text


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"algorithm": FedAvg()}, "weighting=uniform"),
        ({"algorithm": Scaffold("uniform")}, "needs FedAvg"),
        ({"aggregation": PrivateMean(1.0, 1.0, delta=0.01)}, "needs FedAvg or FedProx, no aggregation"),
        ({"further": [TopK(0.5, error_feedback=False)]}, "no other codec"),
        ({"limits": Limits(enforce=True)}, "limits.enforce left out"),
        ({"parts": [ProductError()]}, "no part that changes updates"),
        ({"clients": 4}, "as many clients in a round, and 3 are asked"),
    ],
)
def test_shared_noise_needs_one_sum_of_enough_clients(change, reason):
    with refusal(f"ClipAndNoise with shared_by=.*{reason}"):
        share(**change)
