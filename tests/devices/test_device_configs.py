import pytest
import yaml

from fedlight import conf
from fedlight.devices.device import known_devices, load_device
from fedlight.devices.fleet import Fleet

FLEETS = ("phones", "mixed", "edge", "edgeflowertune")


def notes(name):
    """Topic -> what the comment of a profile says of it."""
    found, topic = {}, ""
    for line in conf.path(f"devices/{name}.yaml").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            continue
        head, colon, rest = line[2:].partition(":")
        if colon and head.istitle() and head.isalpha():
            topic, line = head, "#" + rest
        found[topic] = found.get(topic, "") + line[1:]
    return found


def test_a_dozen_devices_and_their_fleets():
    assert len(known_devices()) >= 12
    assert {file.stem for file in conf.path("devices/fleets").glob("*.yaml")} == set(FLEETS)
    assert set().union(*(Fleet(name).devices for name in FLEETS)) == set(known_devices())


@pytest.mark.parametrize("name", known_devices())
def test_every_figure_has_a_source(name):
    device, said = load_device(name), notes(name)
    assert device.name == name
    assert "https://" in said["Memory"]
    for topic in ("Speed", "Power"):
        assert "http" in said[topic] or "estimate" in said[topic]
    assert "http" in said["Network"] or "Ethernet" in said["Network"]
    assert len(said["Base"]) > 20
    if "availability" in conf.path(f"devices/{name}.yaml").read_text(encoding="utf-8"):
        assert "estimate" in said["Availability"]


@pytest.mark.parametrize("name", FLEETS)
def test_fleets(name):
    text = conf.path(f"devices/fleets/{name}.yaml").read_text(encoding="utf-8")
    settings = yaml.safe_load(text)
    assert settings["class_path"] == "Fleet"
    assert f"devices/fleets/{name}.yaml" in text
    fleet = Fleet(**settings["init_args"])
    assert sum(settings["init_args"]["devices"].values()) == pytest.approx(1)
    dealt = fleet.assign([f"c{i}" for i in range(40)]).values()
    assert {device.name for device in dealt} == {*fleet.devices}
    kinds = {device.weight_bits for device in fleet.devices.values()}
    assert len(kinds) >= 2  # a mixed fleet: precisions are swapped between visits
