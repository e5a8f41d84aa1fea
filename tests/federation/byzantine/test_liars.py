import numpy as np
import pytest
import torch
from refusals import refusal

from fedlight.federation.byzantine.liars import Liars, lied

NAMES = [f"c{i:02}" for i in range(40)]


def test_a_drawn_share_is_exact_and_a_matter_of_seed_and_ids():
    liars = Liars(share=0.3, seed=1).among(NAMES)
    assert len(liars) == 12
    assert liars == sorted(liars)
    assert liars == Liars(share=0.3, seed=1).among(NAMES[::-1])
    assert liars != Liars(share=0.3, seed=2).among(NAMES)
    assert set(liars) < set(Liars(share=0.5, seed=1).among(NAMES))  # more liars are these and others
    assert Liars(share=0.0).among(NAMES) == []
    assert Liars(share=1.0).among(NAMES) == NAMES


def test_given_clients_lie():
    assert Liars(clients=["c07", "c03"]).among(NAMES) == ["c03", "c07"]
    assert Liars(clients=[]).among(NAMES) == []
    assert Liars(clients=["c03"]).named(NAMES, "flip") == "1 of 40 clients lie (flip): c03"
    assert Liars(share=0.0).named(NAMES, "flip") == "0 of 40 clients lie (flip): none"
    with refusal(r"liars\.clients has 'x', which is no client of the data: take it out"):
        Liars(clients=["c03", "x"]).among(NAMES)
    for share in (-0.1, 1.1, float("nan")):
        with refusal(rf"liars.share={share} .* must be in \[0, 1\]"):
            Liars(share=share)


def movement():
    stream = torch.Generator().manual_seed(0)
    values = {name: torch.randn(30, 4, generator=stream, dtype=torch.float64) for name in "ab"}
    values["a"][:, 2:] = 0  # as beyond a client's LoRA rank
    return values


def vector(state):
    return np.concatenate([state[name].numpy().ravel() for name in sorted(state)])


def test_lies_by_hand():
    honest = vector(movement())
    np.testing.assert_array_equal(vector(lied(movement(), "flip", 1.0, seed=0)), -honest)
    np.testing.assert_array_equal(vector(lied(movement(), "scale", 10.0, seed=0)), 10 * honest)


def test_noise_has_the_norm_of_the_update_and_nothing_else_of_it():
    honest, noise = vector(movement()), vector(lied(movement(), "noise", 2.0, seed=3))
    assert np.linalg.norm(noise) == pytest.approx(2 * np.linalg.norm(honest), rel=1e-12)
    assert ((noise == 0) == (honest == 0)).all()
    assert abs(noise @ honest) < 0.25 * np.linalg.norm(noise) * np.linalg.norm(honest)
    backward = dict(reversed(movement().items()))
    np.testing.assert_array_equal(vector(lied(backward, "noise", 2.0, seed=3)), noise)
    assert (vector(lied(movement(), "noise", 2.0, seed=4)) != noise).any()
    still = {"a": torch.zeros(3)}
    assert lied(still, "noise", 2.0, seed=0)["a"].tolist() == [0.0, 0.0, 0.0]
