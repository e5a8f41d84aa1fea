"""benchmarks/device_calibration.py at a tiny size, and on times that can be worked out by hand."""

import json

import device_calibration
import pytest
import torch
from device_calibration import (
    TINY,
    Case,
    cases,
    load,
    make_batch,
    on_threads,
    predict,
    save_model,
    summary,
    time_visit,
)

from fedlight.devices.cost import CostMeter
from fedlight.modules.language.adapters import Lora
from fedlight.modules.sft import SFTModule

pytestmark = pytest.mark.slow  # a whole benchmark


def test_cases_are_all_combinations_in_the_order_of_their_names_and_threads_are_set_back():
    found = cases(TINY, [2, 1], ["fp32", "nf4"])
    assert len(found) == 2 * 2 * 1 * 3
    first = ["1/fp32/32/1x008", "1/fp32/32/2x008", "1/fp32/32/2x016", "1/nf4/32/1x008"]
    assert [case.name for case in found][:4] == first
    before = torch.get_num_threads()
    with on_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


def test_predictions_by_hand():
    """With a peak of 100, fp32 reaches shares of 0.4 (fitted) and 0.4, nf4 of 0.1 (fitted) and 0.2."""
    times = [("fp32", 1, 10, 0.25), ("fp32", 2, 20, 0.5), ("nf4", 1, 10, 1.0), ("nf4", 2, 20, 1.0)]
    measured = [(Case(1, form, 32, examples, 8), flops, seconds) for form, examples, flops, seconds in times]
    rows, found = predict(measured, {1: 100.0})
    assert [row.fitted for row in rows] == [True, False, True, False]
    assert found == pytest.approx({"threads=1": 0.2, "threads=1, fp32": 0.4, "threads=1, nf4": 0.1})
    assert [row.by_device for row in rows] == pytest.approx([0.5, 1.0, 0.5, 1.0])
    assert [row.by_form for row in rows] == pytest.approx([0.25, 0.5, 1.0, 2.0])
    told = summary(rows)
    for way in ("by_device", "by_form"):
        assert told[way] == pytest.approx({"cases": 2, "within_goal": 1, "median": 0.5, "largest": 1.0})
    with pytest.raises(ValueError, match="threads=1, nf4: there is no case on which to fit"):
        predict([measured[0], measured[2]], {1: 100.0})


def test_operations_are_those_of_the_batch_that_is_trained(tmp_path):
    """The loss of the counted step and of the timed one are over the same tokens."""
    case = Case(1, "fp32", 32, 2, 8)
    model = save_model(tmp_path, 32, TINY)
    batch = make_batch(case, TINY.words)
    assert batch["input_ids"].shape == (2, 8)
    meter = CostMeter(SFTModule(model, lora=Lora(rank=8, dropout=0.0)))
    products = 2 * (32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 128)
    least = 2 * 2 * (2 * 8 * products + 2 * 7 * 32 * TINY.words)  # forward, and backward of the inputs
    assert least < device_calibration.step_flops(meter, case) < 2 * least  # LoRA and attention come on top
    module = load(model, "fp32")
    before = {name: weight.clone() for name, weight in module.named_parameters() if weight.requires_grad}
    assert time_visit(module, batch, steps=2) > 0
    after = dict(module.named_parameters())
    assert any(not after[name].equal(weight) for name, weight in before.items())  # training was timed


@pytest.mark.filterwarnings("ignore")
def test_all_that_it_writes(tmp_path, capsys):
    file = tmp_path / "found.json"
    device_calibration.main(["--tiny", "--steps=1", "--threads=1", "--plan", f"--json={file}"])
    assert "visits of 1 steps: about" in capsys.readouterr().out
    assert not file.exists()
    device_calibration.main(["--tiny", "--steps=1", "--threads=1", f"--json={file}"])
    found = json.loads(file.read_text())
    forms = {row["case"]["form"] for row in found["rows"]}
    assert {"fp32", "bf16"} <= forms
    assert len(found["rows"]) == 3 * len(forms)
    assert set(found["utilisation"]) == {"threads=1", *(f"threads=1, {form}" for form in forms)}
    for row in found["rows"]:
        assert row["seconds"] > 0
        share = row["flops"] / found["peaks"]["1"]
        assert row["by_device"] * found["utilisation"]["threads=1"] == pytest.approx(share)
    assert "peak of threads=1" in capsys.readouterr().out
