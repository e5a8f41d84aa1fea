from lightning.pytorch.loggers import CSVLogger
from plain_lightning import trainer as make_trainer
from tiny_world import EVAL_PROMPTS, HELDOUT, VOTES, table

from fedlight import DPOModule, FederatedLoop, Judge, PreferenceDataModule, PromptDataModule, WinRate
from fedlight.datamodules.rows.split import Split

EXPECTED = {
    *("train/loss", "val/loss", "win_rate/alphabet", "win_rate/words"),
    *("fed/loss", "fed/clients", "fed/bytes_down", "fed/bytes_up"),
}


class LaterInTheAlphabet(Judge):
    """A judge without a model."""

    def verdicts(self, fields, ours, theirs):
        return [0.5 if a == b else float(a > b) for a, b in zip(ours, theirs, strict=True)]


def test_every_logger_gets_all_that_belongs_to_a_run(tiny_model, tmp_path):
    """Two rounds of two clients, of two steps each."""
    prompts = PromptDataModule(EVAL_PROMPTS, tokenizer=tiny_model, max_tokens=128, eval_batch_size=12)
    win_rate = WinRate(prompts, {"alphabet": LaterInTheAlphabet()}, max_new_tokens=4)
    fit = make_trainer(
        2,
        [FederatedLoop(clients_per_round=2, local_steps=2), win_rate],
        log_every_n_steps=1,
        default_root_dir=tmp_path,
        num_sanity_val_steps=0,
        logger=[CSVLogger(tmp_path, name="one"), CSVLogger(tmp_path, name="other")],
    )
    data = PreferenceDataModule(
        VOTES, split=Split(test_source=HELDOUT, val_share=0.2), view="dpo", tokenizer=tiny_model, batch_size=2
    )
    fit.fit(DPOModule(tiny_model, lr=0.01), datamodule=data)
    one, other = (table(tmp_path / name / "version_0/metrics.csv") for name in ("one", "other"))
    assert one == other
    steps = {name: [row["step"] for row in one if row[name]] for name in one[0]}
    assert set(steps) >= EXPECTED
    assert len(steps["train/loss"]) == len(steps["train/reward_margin"]) == len(steps["fed/bytes_up"]) == 2
    assert steps["win_rate/alphabet"] == ["0", "4", "8"]  # before training too
