import lightning as L
import pytest
from adapted import same
from lightning.pytorch.callbacks import ModelCheckpoint
from plain_lightning import trainer
from synthetic_data import Words
from tiny_world import make_model

from fedlight import FederatedLoop, FewFedPIT, InstructionDataModule, Lora, Partition, SFTModule
from fedlight.datamodules.rows.split import Split
from fedlight.datamodules.synthesis.datamodule import SyntheticInstructionDataModule

COLUMNS = {"instruction": "instruction", "input": "input", "response": "output", "client": "client"}
SETTINGS = {"columns": COLUMNS, "template": "POST : {instruction} {input}\nCHOICE :", "max_tokens": 64}


class Seen(L.Callback):
    """Splits and rows of the batches, as they are trained on."""

    def __init__(self):
        self.rows = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        loop = next(one for one in trainer.callbacks if isinstance(one, FederatedLoop))
        tokenizer = trainer.datamodule.tokenizer
        texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in batch["input_ids"]]
        visit = loop.visit
        self.rows += [(loop.rounds_done, visit.client_id, visit.split, text.strip()) for text in texts]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def fit(tmp_path, model):
    def fit(algorithm, folder="run", rounds=2, makes=True, ckpt_path=None, callbacks=()):
        kind = SyntheticInstructionDataModule if makes else InstructionDataModule
        data = kind(
            "toy:instructions?num_clients=3&client_rows=6",
            **SETTINGS | ({"synthesis": Words(sizes=(6, 5, 1)), "keep": 2} if makes else {}),
            **{"tokenizer": model, "partition": Partition("client"), "batch_size": 2},
            split=Split(val_share=0.0),
        )
        seen = Seen()
        module = SFTModule(model, lr=0.01, dtype="fp32", lora=Lora(dropout=0.0))
        trainer(
            rounds,
            [FederatedLoop(algorithm, clients_per_round=3), seen, *callbacks],
            **{"limit_val_batches": 0, "num_sanity_val_steps": 0, "log_every_n_steps": 1},
            enable_checkpointing=bool(callbacks),
            default_root_dir=tmp_path / folder,
        ).fit(module, data, ckpt_path=ckpt_path, weights_only=True if ckpt_path else None)
        return {name: weight.clone() for name, weight in module.state_dict().items()}, seen.rows, data

    return fit


def test_every_visit_trains_on_its_own_data(fit):
    _, rows, data = fit(FewFedPIT(0.5))
    all_rows = [(client, row) for client, some in data.client_rows.items() for row in some]
    own = {(client, f"{row['instruction']} {row['input']}") for client, row in all_rows}
    splits = ("train", "synthetic")
    visits = list(dict.fromkeys(row[:3] for row in rows))
    assert visits == [(r, f"c{n}", split) for r in (0, 1) for n in range(3) for split in splits]
    for _, client, split, text in rows:
        asked = text.removeprefix("POST : ").partition(" CHOICE")[0].strip()
        assert ((client, asked) in own) == (split == "train")
        assert asked.startswith("which ") or split == "train"
    assert len({row[3] for row in rows if row[:3] == (0, "c0", "synthetic")}) == 2
    assert {row[3] for row in rows if row[:3] == (0, "c2", "synthetic")} != set()
    made = [{row[3] for row in rows if row[0] == r and row[2] == "synthetic"} for r in (0, 1)]
    assert made[0].isdisjoint(made[1])  # others in each round


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_resumed_run_makes_what_is_missing_and_ends_with_the_same_model(fit, tmp_path):
    def keep(folder):
        options = {"save_top_k": -1, "save_on_train_epoch_end": True, "filename": "{epoch}"}
        return [ModelCheckpoint(tmp_path / folder, **options)]

    whole, rows, _ = fit(FewFedPIT(0.5), "whole", rounds=3)
    fit(FewFedPIT(0.5), "first", rounds=2, callbacks=keep("kept"))
    options = {"callbacks": keep("further"), "ckpt_path": tmp_path / "kept" / "epoch=0.ckpt"}
    resumed, rest, data = fit(FewFedPIT(0.5), "first", rounds=3, **options)
    assert len(data.synthesis.calls) == 1  # the second round's candidates are there
    assert rest == [row for row in rows if row[0] > 0]
    assert same(whole, resumed)
