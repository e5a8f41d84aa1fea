"""benchmarks/edge_devices.py on a small Gemma 3 and on numbers that can be worked out by hand."""

import json
from dataclasses import replace

import edge_devices
import pytest
from edge_devices import Case, compare, expect, fit_utilisation, halves, summary

from fedlight.devices.device import Device, load_device

UNIT = Device("unit", memory_gib=1, tflops=1, download_mbps=1, upload_mbps=1, watts=1)
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gemma")
    config = {"model_type": "gemma3_text", "num_attention_heads": 4, "num_key_value_heads": 1}
    config["vocab_size"] = 64
    (folder / "config.json").write_text(json.dumps({**config, **SIZES}))
    return str(folder)


def test_every_second_name_is_fitted_to_the_geometric_mean_of_the_shares():
    assert halves(["d", "a", "c", "b", "e"]) == {"a": True, "b": False, "c": True, "d": False, "e": True}
    cases = [(UNIT, 2e12, 10.0), (replace(UNIT, tflops=4), 8e12, 2.5)]  # shares 0.2 and 0.8
    assert fit_utilisation(cases) == pytest.approx(0.4)


def test_a_small_model_by_hand(model):
    """LoRA of rank 2 on four layers: A has 2 rows of the inputs, B 2 columns of the outputs."""
    case = Case("jetson_nano/one/a", "x", batch=2, parts=3, tokens=9, steps=5, step_seconds=1.0, ranks=(2,))
    flops, peak, sent = expect(case, model)
    adapter = 2 * 2 * ((16 + 32) + 2 * (16 + 8) + (32 + 16))  # rank, layers, q, k and v, o
    assert sent == 4 * adapter
    attention = 16 * (32 + 8 + 8) + 32 * 16
    layer, head = attention + 3 * 16 * 32, 16 * 64
    # Forward, and backward of the inputs; of the adapter also of its weights. Attention has two products, and five backward.
    products = 2 * 9 * (2 * 2 * layer + 3 * adapter) + 2 * 2 * 8 * head + 2 * 2 * 4 * 9 * 9 * 8 * (2 + 5)
    first = 2 * 9 * (16 * 48 + 3 * 2 * 16)  # inputs of the first layer need no gradient
    # Some releases count rotary frequencies.
    assert flops == pytest.approx(3 * 2 * (products - first), rel=2e-4)
    # With four norms a layer and two of the heads, and the last.
    frozen = 2 * (layer + 4 * 16 + 2 * 8) + 16 + 64 * 16
    assert peak * 1e6 > 4 * (frozen + 4 * adapter)  # gradients and two moments beside the adapter
    wider = expect(replace(case, ranks=(2, 4)), model)
    assert wider[2] == 6 * adapter
    assert wider[0] > flops
    assert expect(replace(case, steps=1), model) == (flops, peak, sent)  # of a step, however many there are


def test_fitted_and_tested_halves(model):
    """Four boards that are 1, 2, 4 and 8 times as slow: the first and the third give a share of half of the first's."""
    seconds = {"a": 1, "b": 2, "c": 4, "d": 8}
    cases = [Case(f"jetson_nano/one/{name}", "x", 1, 1, 8, 1, each) for name, each in seconds.items()]
    rows, found = compare(cases[::-1], model)
    assert {row.case.name[-1]: row.fitted for row in rows} == {"a": True, "b": False, "c": True, "d": False}
    share = rows[0].flops / 2 / (load_device("jetson_nano").tflops * 1e12)
    assert found == {"jetson_nano": pytest.approx(share), "jetson_nano, x": pytest.approx(share)}
    assert [row.by_device for row in rows] == pytest.approx([2, 2, 2, 2])
    told = summary(rows)["seconds, one utilisation for each device"]  # of 0 and -0.75
    assert told == pytest.approx({"cases": 2, "within_goal": 1, "median": 0.375, "largest": 0.75})


def test_releases_have_their_own_utilisation_and_a_fitted_case(model):
    slow = [Case(f"jetson_nano/two/{n}", "y", 1, 1, 8, 1, 100.0) for n in "ab"]
    fast = [Case(f"jetson_nano/one/{n}", "x", 1, 1, 8, 1, 1.0) for n in "ab"]
    rows, _ = compare([*fast, *slow], model)
    assert [row.by_release for row in rows] == pytest.approx([1, 1, 100, 100])
    assert [row.by_device for row in rows] == pytest.approx([10, 10, 10, 10])
    cases = [Case(f"jetson_nano/{n}/a", n, 1, 1, 8, 1, 1.0) for n in "ab"]
    with pytest.raises(ValueError, match="jetson_nano, b: there is no case on which to fit"):
        compare(cases, model)


def test_all_that_it_writes(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(edge_devices, "conf_path", lambda name: model)
    edge_devices.main(["--json", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found["cases"]) == 20
    rows = {row["what"]: row for row in found["rows"]}
    assert (len(rows), rows["bytes sent"]["cases"]) == (5, 20)
    out = capsys.readouterr().out
    assert "utilisation of hi_nova_9_pro, 2026-04-08" in out
    forecast_mb = expect(edge_devices.PEAK_CASE, model)[1]
    peak = rows["memory, peak against a peak"]
    assert peak["median"] == peak["largest"] == pytest.approx(abs(forecast_mb / 4200 - 1))
    assert f"4200 MB published, {forecast_mb:.0f} MB forecast, {forecast_mb / 4200 - 1:+.1%}" in out
