import json

import pytest
from recipe_runs import ran
from tiny_world import HELDOUT, VOTES, table, write_rows

from fedlight.datamodules.preferences.labelling import form_pairs
from fedlight.modules.reward import RewardModule
from fedlight.recipes import steps

ANSWERS = ["anna paints walls .", "duh ben bakes bread .", "finn reads letters .", "gina builds sheds ."]
ONE_ROUND = [
    *("--trainer.accelerator=cpu", f"--data.source={VOTES}", f"--data.split.test_source={HELDOUT}"),
    *("--trainer.max_epochs=1", "--federated.clients_per_round=2", "--federated.local_steps=2"),
    "--data.batch_size=4",
]


def test_a_reward_model_labels_pairs(tiny_model, tmp_path):
    model = f"--model.model={tiny_model}"
    fit = [f"--trainer.default_root_dir={tmp_path / 'reward'}", model, "--model.lr=0.005", *ONE_ROUND]
    ran("fit", "--config=reward.yaml", *fit)
    assert len(table(tmp_path / "reward/visits.csv")) == 2
    adapter = str(tmp_path / "reward/adapter")
    given = ("--config=reward.yaml", *fit, f"--model.adapter={adapter}", "--trainer.logger=false")
    outcome = ran("test", *given)
    assert "test/accuracy" in outcome.out

    prompts = ["anna paints walls . ben bakes bread .", "finn reads letters . gina builds sheds ."]
    rows = [{"fields": {"prompt": prompt}, "completions": ANSWERS} for prompt in prompts]
    completions = write_rows(tmp_path / "completions.jsonl", rows)
    votes = (f"--trainer.default_root_dir={tmp_path}", f"--data.source={completions}")
    votes += ("--data.eval_batch_size=5",)
    ran(
        *("predict", "--config=reward_votes.yaml", "--trainer.accelerator=cpu", model),
        *(f"--model.adapter={adapter}", *votes),
    )
    output = tmp_path / "preferences.jsonl"
    done = steps.label_with_selectors(completions, [str(tmp_path / "votes.jsonl")], str(output), orders="one")
    assert done["pairs"] == 12

    # The labels are what the rewards of prompt and answer alone say.
    module = RewardModule(tiny_model, adapter=adapter)
    module.configure_model()
    module.eval()

    def reward(prompt, answer):
        text = f"{prompt_text(prompt)} {answer}{module.tokenizer.eos_token}"
        return module.rewards(dict(module.tokenizer(text, return_tensors="pt"))).item()

    labelled = [json.loads(line) for line in output.read_text().splitlines()]
    assert len({row["choice"] for row in labelled}) == 2
    for row, pair in zip(labelled, form_pairs(rows, "rows")[0], strict=True):
        margin = reward(row["prompt"], pair.first) - reward(row["prompt"], pair.second)
        assert row["margin"] == pytest.approx(margin, abs=1e-4)
        assert row["choice"] == "ab"[margin < 0]


def prompt_text(prompt):
    from fedlight.datamodules.text.templates import Template

    return Template.named("toy_generation").render({"prompt": prompt}).text


@pytest.mark.parametrize(
    ("config", "view", "metric"), [("dpo", "dpo", "reward_accuracy"), ("sft", "sft", "loss")]
)
def test_central_configs_federate(config, view, metric, tiny_model, tmp_path):
    """FedDPO, and FedAvg on the chosen responses, by overrides alone."""
    arguments = [
        *("--data", "data/toy_votes.yaml", f"--data.view={view}", "--federated", "FederatedLoop", *ONE_ROUND),
        *(f"--model.model={tiny_model}", f"--data.tokenizer={tiny_model}"),
    ]
    ran("fit", f"--config={config}.yaml", f"--trainer.default_root_dir={tmp_path}", *arguments)
    assert (tmp_path / "adapter/adapter_model.safetensors").is_file()
    (metrics,) = (tmp_path / "metrics").rglob("metrics.csv")
    assert "fed/clients" in table(metrics)[0]
