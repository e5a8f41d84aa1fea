from collections import Counter

import pytest
from refusals import refusal

from fedlight.devices.device import load_device
from fedlight.devices.fleet import Fleet, apportion

MIXED = {"pixel_8_pro": 5, "iphone_12": 3, "raspberry_pi_5": 2}


def counts(fleet, clients):
    return Counter(device.name for device in fleet.assign(clients).values())


def test_shares_are_met():
    ids = [f"c{i}" for i in range(10)]
    assert counts(Fleet(MIXED), ids) == MIXED
    assert counts(Fleet({name: weight / 7 for name, weight in MIXED.items()}), ids * 1) == MIXED
    thirteen = {"pixel_8_pro": 6, "iphone_12": 4, "raspberry_pi_5": 3}
    assert counts(Fleet(MIXED), [f"c{i}" for i in range(13)]) == thirteen
    assert counts(Fleet(MIXED), ["c0"]) == {"pixel_8_pro": 1}
    assert Fleet(MIXED, deadline_seconds=5.0).assign([]) == {}
    assert Fleet(MIXED).weights == {"pixel_8_pro": 0.5, "iphone_12": 0.3, "raspberry_pi_5": 0.2}


def test_the_order_of_clients_does_not_matter_but_the_seed_does():
    assert Fleet({"iphone_12": 1}).assign(["a"]) == {"a": load_device("iphone_12")}
    ids = [f"c{i}" for i in range(100)]
    dealt = Fleet(MIXED, seed=1).assign(ids)
    assert list(dealt) == sorted(ids)
    assert Fleet(MIXED, seed=1).assign(ids[::-1]) == dealt
    assert Fleet(MIXED, seed=2).assign(ids) != dealt
    assert counts(Fleet(MIXED, seed=2), ids) == {"pixel_8_pro": 50, "iphone_12": 30, "raspberry_pi_5": 20}


@pytest.mark.slow
def test_every_client_has_the_same_chances():
    """Over many seeds each client has each device as often as its weight says."""
    fleet, names = Fleet(MIXED), []
    for fleet.seed in range(400):
        names.append(fleet.assign([f"c{i}" for i in range(10)])["c3"].name)
    assert Counter(names)["pixel_8_pro"] / 400 == pytest.approx(0.5, abs=0.08)
    assert Counter(names)["raspberry_pi_5"] / 400 == pytest.approx(0.2, abs=0.06)


@pytest.mark.parametrize(
    ("shares", "total", "expected"),
    [
        ([1.0], 7, [7]),
        ([0.5, 0.5], 3, [2, 1]),
        ([0.1, 0.2, 0.7], 10, [1, 2, 7]),
        ([0.4, 0.35, 0.25], 2, [1, 1, 0]),
        ([1 / 3, 1 / 3, 1 / 3], 2, [1, 1, 0]),
        ([0.47, 0.16, 0.158, 0.12, 0.061, 0.031], 10, [5, 2, 1, 1, 1, 0]),
        ([0.25] * 4, 0, [0, 0, 0, 0]),
        ([weight / 51 for weight in (8, 9, 2, 8, 20, 4)], 2380, [374, 420, 93, 373, 933, 187]),
    ],
)
def test_largest_remainders(shares, total, expected):
    assert apportion(shares, total) == expected


@pytest.mark.parametrize(
    ("devices", "complaint"),
    [
        ({}, "fleet.devices is empty"),
        ({"iphone_12": 0}, "fleet.devices.iphone_12=0 must be above 0"),
        ({"iphone_12": 1, "pixel_8_pro": -1}, "fleet.devices.pixel_8_pro=-1 must be above 0"),
        ({"iphone_12": float("nan")}, "must be above 0"),
        ({"pixel_8_pro": 1, "iphone_12": 1, "iphone_12.yaml": 1}, "has two files named 'iphone_12'"),
    ],
)
def test_what_is_no_fleet(devices, complaint):
    with refusal(complaint):
        Fleet(devices)


def test_a_scaled_fleet_has_less_of_everything_but_hours_and_watts():
    whole, small = (Fleet({"iphone_12": 1}, scale=scale).devices["iphone_12"] for scale in (1, 200))
    assert small.budget_bytes == whole.budget_bytes // 200
    assert small.compute_seconds(1e9) == pytest.approx(200 * whole.compute_seconds(1e9))
    assert small.upload_seconds(1000) == pytest.approx(200 * whole.upload_seconds(1000))
    assert small.download_seconds(1000) == pytest.approx(200 * whole.download_seconds(1000))
    for name in ("watts", "availability", "weight_bits"):
        assert getattr(small, name) == getattr(whole, name)
    with refusal(r"fleet\.scale=0 must be above 0"):
        Fleet({"iphone_12": 1}, scale=0)


def test_a_fleet_of_fedlight_by_its_name():
    whole = Fleet("phones", seed=3, scale=2)
    assert whole.weights.keys() >= {"iphone_12", "galaxy_a54"}
    assert whole.seed == 3
    with pytest.raises(
        FileNotFoundError, match="there is no fleet 'phonez': give one of edge, edgeflowertune"
    ):
        Fleet("phonez")
    with pytest.raises(FileNotFoundError, match="there is no device 'iphone_99'"):
        Fleet({"iphone_99": 1})
