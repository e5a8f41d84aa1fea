"""benchmarks/trl_trainers.py without TRL: fedlight's side, what is compared and what is refused."""

import json
import math

import pytest
import torch
from turns import Counting

TASKS = ("sft", "reward", "dpo")


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    from peers_ways import Settings, save_model

    made = Settings(str(tmp_path_factory.mktemp("trl") / "model"), [[2, 8]], 1, steps=3, hidden=16, layers=1)
    save_model(made)
    return made


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("task", TASKS)
def test_fedlight_trains_all_rounds_and_notes_its_losses(settings, task, monkeypatch):
    import trl_trainers

    from fedlight import DPOModule

    passes, turns, reference = [], Counting(), DPOModule.reference_pass
    counted = lambda self, batch: passes.append(1) or reference(self, batch)  # noqa: E731
    monkeypatch.setattr(DPOModule, "reference_pass", counted)
    trl_trainers.train_own(task, settings, [2, 8], turns)
    assert (turns.rounds, turns.stopped) == (2, 1)
    first, second = json.loads(trl_trainers.loss_file(settings, f"fedlight: {task}", "2x8").read_text())
    assert second < first
    if task == "dpo":
        assert first == pytest.approx(math.log(2), abs=0.01)
    assert len(passes) == (6 if task == "dpo" else 0)


def test_both_sides_start_from_the_same_adapter():
    from trl_trainers import set_start

    def make():
        layer = torch.nn.ModuleDict({name: torch.nn.Linear(4, 4) for name in ("lora_A", "lora_B", "base")})
        layer["base"].requires_grad_(False)
        return layer

    one, other = make(), make()
    before = one["base"].weight.clone()
    for model in (one, other):
        set_start(model)
    assert torch.equal(one["lora_A"].weight, other["lora_A"].weight)
    assert one["lora_A"].weight.abs().sum() > 0 == one["lora_B"].weight.abs().sum()
    assert torch.equal(one["base"].weight, before)


def test_the_ratio_is_taken_in_each_turn_and_unlike_losses_are_refused(settings):
    from trl_trainers import compare, loss_file

    found = {("fedlight: sft", "2x8"): [1.0, 2.0, 4.0], ("trl: sft", "2x8"): [2.0, 3.0, 4.0]}
    found |= {("fedlight: dpo", "2x8"): [1.0]}  # TRL's side was left out
    for side, losses in (("fedlight", [2.0, 1.0]), ("trl", [2.0, 1.001])):
        loss_file(settings, f"{side}: sft", "2x8").write_text(json.dumps(losses))
    [row] = compare(found, settings, 0.01)
    assert [row[key] for key in ("ratio", "low", "high")] == [1.5, 1.0, 2.0]
    assert [row["steps"], row["trl_steps"], row["last_loss"]] == [1.5, 1.0, 1.0]
    assert row["apart"] == pytest.approx(0.001, rel=0.01)
    with pytest.raises(ValueError, match="sft, 2x8: losses"):
        compare(found, settings, 1e-4)
