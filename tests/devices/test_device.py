import itertools
import math

import pytest
import yaml

from fedlight.devices.availability import Always, Chance
from fedlight.devices.device import Device, known_devices, load_device

PHONE = {"memory_gib": 6, "tflops": 2, "download_mbps": 80, "upload_mbps": 16, "watts": 5}


def test_units():
    phone = Device("phone", **PHONE, memory_share=0.25, utilisation=0.5)
    assert phone.budget_bytes == 1_610_612_736  # 1.5 GiB
    assert phone.download_seconds(20_000_000) == 2  # 160 megabits at 80 a second
    assert phone.upload_seconds(20_000_000) == 10
    assert phone.compute_seconds(3e12) == 3  # half of 2 * 10^12 a second
    assert Device("phone", **PHONE).budget_bytes == 3 * 2**30
    assert Device("phone", **PHONE).compute_seconds(6 * 10**11) == 1
    assert Device("phone", **PHONE).availability == Always()
    assert Device("phone", **PHONE, memory_share=1).budget_bytes == 6 * 2**30


@pytest.mark.parametrize(
    ("keys", "values", "range_"),
    [
        (PHONE, [0, -1, math.inf, math.nan, "8", True, None], "a number above 0"),
        (["memory_share", "utilisation"], [0, 1.01], "a number above 0 and at most 1"),
        (["weight_bits"], [2, 32, "4", None], "16, 8 or 4"),
    ],
)
def test_figures_out_of_range(keys, values, range_):
    for key, value in itertools.product(keys, values):
        with pytest.raises(ValueError, match=f"device 'phone': {key}={value!r} must be {range_}"):
            Device("phone", **PHONE | {key: value})


def write(folder, text):
    file = folder / "my_phone.yaml"
    file.write_text(text)
    return str(file)


FIGURES = "memory_gib: 6\ntflops: 2\ndownload_mbps: 80\nupload_mbps: 16\nwatts: 5\n"


def test_a_file_of_ones_own(tmp_path):
    assert load_device(write(tmp_path, FIGURES)) == Device("my_phone", **PHONE)
    exponents = FIGURES.replace(": 2\n", ": 2e0\n").replace(": 80", ": 8e+1").replace(": 5", ": 50E-1")
    assert load_device(write(tmp_path, exponents)) == Device("my_phone", **PHONE)
    more = {"weight_bits": 4, "memory_share": 0.4, "utilisation": 0.2}
    text = FIGURES + yaml.safe_dump(more | {"availability": 0.7})
    assert load_device(write(tmp_path, text)) == Device("my_phone", **PHONE, **more, availability=Chance(0.7))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (FIGURES + "ram: 8", "there is no key 'ram' of a device; there are memory_gib, tflops,"),
        (FIGURES + "name: mine", "there is no key 'name'"),
        (FIGURES.replace("watts: 5", ""), "watts is missing; a device has memory_gib"),
        (FIGURES.replace("watts: 5", "watts: much"), "watts='much' must be a number above 0"),
        (FIGURES + "availability: 2", "availability=2.0 is a probability"),
        (FIGURES + "weight_bits: 4.5", "weight_bits=4.5 must be 16, 8 or 4"),
        (FIGURES + "weight_bits: 4.0", "weight_bits=4.0 must be 16, 8 or 4"),
        (FIGURES + "watts: 6", "found duplicate key watts"),
        ("", "is no device: it has no keys such as memory_gib"),
        ("- 1\n- 2\n", "this is no device"),
        ("a: [", "is no YAML that can be read"),
    ],
)
def test_a_bad_file(tmp_path, text, complaint):
    file = write(tmp_path, text)
    with pytest.raises(ValueError) as error:  # noqa: PT011
        load_device(file)
    assert complaint in str(error.value)
    assert "my_phone" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["iphone_99", "nowhere/iphone_12.yaml", "fleets/phones", "../selector"])
def test_an_unknown_name_lists_those_there_are(name):
    with pytest.raises(FileNotFoundError) as error:
        load_device(name)
    assert f"there is no device {name!r}" in str(error.value)
    assert ", ".join(known_devices()) in str(error.value)
