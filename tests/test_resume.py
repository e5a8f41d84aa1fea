"""A run that goes on from any of its checkpoints ends bit for bit where the uninterrupted one did."""

import pytest
from tiny_world import VOTES, fedlight, table, tiny_selector, weights

CASES = {
    "federated": [],
    "central": ["--federated=null", "--data.batch_size=16"],
    "nf4": ["--model.base=nf4", "--trainer.limit_val_batches=0"],
    "classifier": ["--model.head=classifier", "--data.form=pair", "--model.lr_schedule=cosine"],
}


def metrics(folder):
    """What was logged, by step: one row of each kind per epoch, so the last of a step holds them all."""
    logged = {}
    for row in [row for file in folder.glob("metrics/*/metrics.csv") for row in table(file)]:
        known = {key: value for key, value in row.items() if value and not key.startswith("train/")}
        logged.setdefault(row["step"], {}).update(known)
    return logged


def dpo(model, folder, *more):
    return [
        *("--config=dpo.yaml", "--trainer.accelerator=cpu", f"--trainer.default_root_dir={folder}"),
        *(
            f"--model.model={model}",
            f"--data.source={VOTES}",
            "--data.batch_size=16",
            "--model.lr=0.01",
            "--data.choice_values={a: a, b: b, tie: tie}",
            *more,
        ),
    ]


@pytest.mark.filterwarnings("ignore:The dirpath has changed")  # each resumed run has a folder of its own
@pytest.mark.parametrize("case", [*CASES, "dpo"])
def test_resumed_from_every_checkpoint(case, tiny_model, tmp_path):
    def fit(folder, *more):
        arguments = (dpo if case == "dpo" else tiny_selector)(tiny_model, folder, *CASES.get(case, []))
        keep_all = ("--trainer.callbacks.init_args.save_top_k=-1", "--trainer.max_epochs=3")
        outcome = fedlight("fit", *arguments, *keep_all, *more)
        assert outcome.code == 0, outcome.err
        return weights(folder), metrics(folder)

    whole, logged = fit(tmp_path / "whole")
    checkpoints = sorted((tmp_path / "whole/checkpoints").iterdir())
    assert [file.name for file in checkpoints] == ["epoch=0.ckpt", "epoch=1.ckpt", "epoch=2.ckpt"]
    for epoch, checkpoint in enumerate(checkpoints[:-1]):
        resumed, logged_again = fit(tmp_path / f"from{epoch}", f"--ckpt_path={checkpoint}")
        assert resumed == whole
        assert logged_again == {step: row for step, row in logged.items() if step in logged_again}
        assert len(logged_again) == len(logged) * (2 - epoch) / 3
    if case in ("federated", "dpo"):
        assert fit(tmp_path / "ended", f"--ckpt_path={checkpoints[-1]}")[0] == whole


def test_a_resumed_run_keeps_its_optimizers_settings(tiny_model, tmp_path):
    arguments = ["fit", *tiny_selector(tiny_model, tmp_path)]
    assert fedlight(*arguments).code == 0
    going_on = f"--ckpt_path={tmp_path / 'checkpoints/epoch=0.ckpt'}"
    outcome = fedlight(*arguments, "--model.lr=0.5", going_on)
    assert outcome.code == 1
    assert (
        "trained with lr=0.003 and goes on with it, not with lr=0.5: give the same, or start anew"
        in outcome.err
    )
    # What does not belong to the optimizer is as the config says, not as the checkpoint has it.
    printed = fedlight(*arguments, "--model.lora_dropout=0.2", going_on, "--print_config").out
    assert "lora_dropout: 0.2" in printed
    assert fedlight("test", *arguments[1:], "--model.lr=0.5", going_on).code == 0
