import shutil

import lightning as L
import pytest
import torch
from attacked import BOTH, attacks, files, fit, found, loop, make_data, random_rows
from lightning.pytorch.loggers import CSVLogger
from refusals import refusal
from tiny_world import read_lines, table

from fedlight import SFTModule
from fedlight.callbacks.attacks import DiscoverableMemorization, MembershipInference, MemoryExtraction
from fedlight.callbacks.attacks.membership_inference import membership_metrics
from fedlight.federation.algorithms import FedAvg, FedBiscuit, SoftGroups
from fedlight.federation.algorithms.lora import FedSALoRA
from fedlight.federation.client import write

NAMES = ("discoverable_memorization", "membership_inference", "memory_extraction")


class Watch(L.Callback):
    """The global model after each round, and every upload."""

    def __init__(self):
        self.globals, self.uploads = [], {}

    def on_upload(self, upload):
        self.uploads[upload.round_idx + 1, upload.client_id] = upload.state

    def on_train_epoch_end(self, trainer, pl_module):
        self.globals.append({name: weight.clone() for name, weight in pl_module.state_dict().items()})


class Saving(L.Callback):
    """Keeps a checkpoint of the first round, taken at its end or after validation."""

    def __init__(self, file, at_end):
        self.file, self.at_end = file, at_end

    def on_validation_end(self, trainer, pl_module):
        if trainer.current_epoch == 0 and not self.at_end:
            trainer.save_checkpoint(self.file)

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == 0 and self.at_end:
            trainer.save_checkpoint(self.file)


def logged(folder, name):
    rows = table(folder / "m/version_0/metrics.csv")
    return {int(row["step"]): float(row[name]) for row in rows if row.get(name)}


def test_rounds_and_targets(tiny_model, tmp_path):
    settings = {"every_n_rounds": 2, "before_training": True, "targets": BOTH}
    fit(tiny_model, tmp_path, loop(), *attacks(**settings), logger=CSVLogger(tmp_path, "m"))
    rows = found(tmp_path)
    rounds = [number for number, _ in rows]
    assert rounds == [0, 2, 2, 2, 3, 3, 3]  # each second, and the last
    targets = [target for _, target in rows]
    assert [targets[at] for at in (0, 3, 6)] == ["global"] * 3
    assert all(target.startswith("c") for at, target in enumerate(targets) if at not in (0, 3, 6))
    names = {
        "discoverable_memorization": {"canaries", "exact", "exposure", "left_out", "rouge_l"},
        "membership_inference": {"left_out", "tpr_at_0.1_fpr"}
        | {score + rate for score in ("", "loss_", "min_k_", "lira_") for rate in ("auc", "tpr_at_0.01_fpr")},
        "memory_extraction": {
            f"{of}{name}"
            for of in ("", "response_")
            for name in ("canaries", "exact", "extracted", "rouge_l", "rouge_l_best")
        },
    }
    expected = {f"{name}/{metric}" for name, own in names.items() for metric in own}
    over_rounds = {
        f"membership_inference/rounds_{score}_{rate}"
        for score in ("mean", "slope")
        for rate in ("auc", "tpr_at_0.01_fpr")
    }
    for (number, target), row in rows.items():  # of one round there is no slope
        assert set(row) == expected | (over_rounds if number and target == "global" else set())
    assert set(files(tmp_path)) == {"attacks.csv"} | {
        f"round_{number}/{name}.jsonl" for number in (0, 2, 3) for name in NAMES
    }
    assert logged(tmp_path, "attack/membership_inference/auc")[0] == 0.5
    for number, step in ((2, 8), (3, 12)):
        uploads = [row for (one, target), row in rows.items() if one == number and target != "global"]
        for name in ("membership_inference/auc", "memory_extraction/rouge_l"):
            assert logged(tmp_path, f"attack/{name}")[step] == pytest.approx(rows[number, "global"][name])
            mean = sum(row[name] for row in uploads) / len(uploads)
            assert logged(tmp_path, f"attack/{name.replace('/', '/uploads/')}")[step] == pytest.approx(mean)


def test_training_does_not_notice(tiny_model, tmp_path):
    settings = {"before_training": True, "targets": BOTH}
    saved = []
    for name, callbacks in (("with", attacks(**settings)), ("without", [])):
        _, trainer = fit(tiny_model, tmp_path / name, loop(), *callbacks)
        trainer.save_checkpoint(tmp_path / f"{name}.ckpt")
        saved.append(torch.load(tmp_path / f"{name}.ckpt", weights_only=True))
        assert trainer.lightning_module.training
    one, other = saved
    assert one["state_dict"].keys() == other["state_dict"].keys()
    assert all(torch.equal(weight, other["state_dict"][name]) for name, weight in one["state_dict"].items())
    for part in ("optimizer_states", "lr_schedulers", "global_step", "epoch"):
        assert str(one[part]) == str(other[part])
    loops = [
        {name: str(state) for name, state in saved["callbacks"].items() if "Loop" in name} for saved in saved
    ]
    assert loops[0] == loops[1] != {}
    assert any(weight.abs().sum() for name, weight in one["state_dict"].items() if "lora_B" in name)


@pytest.mark.parametrize("algorithm", [FedAvg, FedSALoRA])
def test_an_upload_is_what_the_client_has_sent(algorithm, tiny_model, tmp_path):
    """Beside what the client keeps, such as its B, the attacker has the server's."""
    data, federated = make_data(), loop(algorithm=algorithm())
    watch = Watch()
    fit(tiny_model, tmp_path, federated, watch, *attacks(targets=BOTH), data=data, max_epochs=2)
    rows = found(tmp_path)
    assert {key for key in rows if key[1] != "global"} == set(watch.uploads)
    assert len(watch.uploads) == 4
    module = SFTModule(tiny_model)
    module.configure_model()
    by_hand = attacks()
    for attack in by_hand:
        attack.prepare(data, module)
    for (number, target), metrics in rows.items():
        if target == "global":
            module.load_state_dict(watch.globals[number - 1])
        else:
            write(watch.uploads[number, target], dict(module.named_parameters()))
        for attack in by_hand:
            expected = attack.attack(module, None if target == "global" else target).metrics
            for name, value in expected.items():
                place = (number, target, name)
                assert metrics[f"{attack.name}/{name}"] == pytest.approx(value, abs=1e-12), place
    if algorithm is FedAvg:
        assert len({metrics["membership_inference/loss_auc"] for metrics in rows.values()}) > 3
    for record in read_lines(tmp_path / "attacks/round_1/membership_inference.jsonl"):
        if record["member"] and record["target"] != "global":
            assert record["client"] == record["target"]


def test_several_uploads_of_a_client_in_a_round_all_count(tiny_model, tmp_path):
    """Under SoftGroups a client sends an update of each selector."""
    federated = loop(algorithm=FedBiscuit(1, 1, SoftGroups(), group_by="own"))
    attack, module = (
        MembershipInference(examples=6, targets=["uploads"]),
        SFTModule(tiny_model, num_adapters=2),
    )
    fit(tiny_model, tmp_path, federated, attack, module=module)
    records = read_lines(tmp_path / "attacks/round_3/membership_inference.jsonl")
    for client in {record["target"] for record in records}:
        losses = [(record["member"], record["loss"]) for record in records if record["target"] == client]
        each = losses[: len(losses) // 2], losses[len(losses) // 2 :]
        assert each[0] != each[1]
        rates = [
            membership_metrics([x for member, x in some if member], [x for member, x in some if not member])
            for some in each
        ]
        expected = sum(rate["auc"] for rate in rates) / 2
        assert found(tmp_path)[3, client]["membership_inference/loss_auc"] == pytest.approx(expected)


def test_the_order_of_the_callbacks_does_not_matter(tiny_model, tmp_path):
    fit(tiny_model, tmp_path / "behind", loop(), *attacks(targets=BOTH), max_epochs=2)
    # as the command line has them
    fit(tiny_model, tmp_path / "before", *attacks(targets=BOTH), loop(), max_epochs=2)
    assert files(tmp_path / "behind") == files(tmp_path / "before")
    assert len(files(tmp_path / "behind")) == 7


@pytest.mark.slow
@pytest.mark.parametrize("federated", [True, False])
def test_a_resumed_run_leaves_the_same_files(tiny_model, tmp_path, federated):
    """Also from a checkpoint that was taken after validation, before the epoch's end."""

    def callbacks():
        settings = {"before_training": True, "targets": BOTH if federated else ("global",)}
        return [*([loop()] if federated else []), *attacks(**settings)]

    moments = [True, False] if federated else [False]
    saving = [Saving(tmp_path / f"{at_end}.ckpt", at_end) for at_end in moments]
    fit(tiny_model, tmp_path / "whole", *callbacks(), *saving)
    whole = files(tmp_path / "whole")
    assert max(number for number, _ in found(tmp_path / "whole")) == 3
    for at_end in moments:
        cut = tmp_path / f"cut_{at_end}"
        shutil.copytree(tmp_path / "whole", cut)  # a run that was killed later on
        table_file = cut / "attacks/attacks.csv"
        rows = table_file.read_text().split("\n")
        later = [row if row[:2] in ("0,", "1,", "ro") else f"3,c9{row[4:]}" for row in rows]
        (at,) = [number for number, row in enumerate(later) if row.startswith("1,global")]
        other = [*later[:at], f"{later[at]}1", *later[at + 1 :]]
        table_file.write_text("\n".join(other))
        with refusal(r"attacks\.csv is damaged or of another run: what memory_extraction found"):
            fit(tiny_model, cut, *callbacks(), ckpt_path=tmp_path / f"{at_end}.ckpt")
        table_file.write_text("\n".join(later[:-2]) + "\n")
        (cut / f"attacks/round_3/{NAMES[0]}.jsonl").write_text("{}\n")
        fit(tiny_model, cut, *callbacks(), ckpt_path=tmp_path / f"{at_end}.ckpt")
        assert files(cut) == whole


def test_a_new_run_replaces_what_an_earlier_one_left(tiny_model, tmp_path):
    fit(tiny_model, tmp_path, loop(), *attacks(before_training=True), max_epochs=2)
    fit(tiny_model, tmp_path, loop(), *attacks(), max_epochs=1)
    assert list(found(tmp_path)) == [(1, "global")]
    assert {name.split("/")[0] for name in files(tmp_path)} == {"attacks.csv", "round_1"}


def test_without_a_federation_epochs_are_attacked(tiny_model, tmp_path):
    _, trainer = fit(tiny_model, tmp_path, *attacks(every_n_rounds=2, output=str(tmp_path / "attacks")))
    assert list(found(tmp_path)) == [(2, "global"), (3, "global")]
    last = found(tmp_path)[3, "global"]["memory_extraction/rouge_l"]
    assert float(trainer.callback_metrics["attack/memory_extraction/rouge_l"]) == pytest.approx(last)


def test_what_does_not_fit_is_left_out_and_said(tiny_model, tmp_path, caplog):
    data = make_data()
    data.setup("fit")
    rows = [
        row
        for client, own in data.client_rows.items()
        for row in [*(one for one in own if one not in data.planted[client]), *data.planted[client]]
    ]
    prompts = [data.template.render(row).text for row in rows]
    lengths = sorted(len(data.tokenizer(prompt)["input_ids"]) for prompt in prompts)
    long = DiscoverableMemorization(max_new_tokens=256 - lengths[len(lengths) // 2])
    module, _ = fit(tiny_model, tmp_path, long, MembershipInference(), data=data, max_epochs=1)
    [metrics] = found(tmp_path).values()
    left_out = metrics["discoverable_memorization/left_out"]
    assert left_out == sum(length > lengths[len(lengths) // 2] for length in lengths)
    assert 0 < left_out < len(prompts)
    assert f"{left_out:.0f} of {len(prompts)} prompts are left out, since they do not fit" in caplog.text
    assert metrics["membership_inference/left_out"] == 0
    long = DiscoverableMemorization(max_new_tokens=256)
    long.prepare(data, module)
    assert long.attack(module, None) == ({"left_out": float(len(prompts))}, [])


@pytest.mark.parametrize("kind", [MemoryExtraction, DiscoverableMemorization, MembershipInference])
def test_what_cannot_be_is_refused_before_any_work(kind, tiny_model, tmp_path):
    for settings, said in (
        ({"every_n_rounds": 0}, "every_n_rounds=0 must be at least 1"),
        ({"targets": ()}, "must name `global`, `uploads` or both"),
        ({"targets": ["clients"]}, r"targets=\['clients'\] must be a Sequence"),
    ):
        with refusal(f"{kind.__name__}.{said}" if "every_n" in said else said):
            kind(**settings)
    with refusal(r"targets=\['uploads'\] needs uploads, and so a federated loop: add one"):
        fit(tiny_model, tmp_path, kind(targets=["uploads"]))
    callback = kind()
    trainer = L.Trainer(accelerator="cpu", logger=False, default_root_dir=tmp_path, callbacks=[callback])
    trainer.datamodule = L.LightningDataModule()
    with refusal("needs a datamodule that knows the clients' rows, such as Instruction"):
        callback.setup(trainer, L.LightningModule(), "fit")
    trainer.datamodule = make_data()
    with refusal(r"needs a module with .*, such as SFTModule, not LightningModule"):
        callback.setup(trainer, L.LightningModule(), "fit")
    named = make_data(random_rows(tmp_path / "rows.jsonl"))
    named.setup("fit")
    named.client_rows["global"] = named.client_rows.pop("c0")
    trainer.datamodule, callback.targets = named, BOTH
    trainer.callbacks.append(loop())
    with refusal("a client is called 'global', as the server's model; rename it"):
        callback.setup(trainer, SFTModule(tiny_model), "fit")
    assert not (tmp_path / "attacks").exists()


def test_a_folder_that_cannot_be_written_is_refused_before_any_work(tiny_model, tmp_path):
    (tmp_path / "file").touch()
    attack = MemoryExtraction(output=str(tmp_path / "file/attacks"))
    with pytest.raises(
        OSError, match=r"MemoryExtraction\.output=.*attacks cannot be written \(.*choose another folder"
    ):
        fit(tiny_model, tmp_path, attack)


def test_settings_and_data_of_one_attack(tiny_model, tmp_path):
    for settings, said in (
        ({"temperature": 0}, r"temperature=0 must be in \(0, inf\)"),
        ({"top_p": 0}, r"top_p=0 must be in \(0, 1\]"),
        ({"forms": "input"}, r"MemoryExtraction: forms='input' is not one of all, without_input"),
        ({"samples": 0}, r"MemoryExtraction\.samples=0 must be at least 1"),
        ({"clients": []}, r"MemoryExtraction\.clients=\[\] must name clients"),
        ({"clients": ["c9"]}, r"MemoryExtraction\.clients: 'c9' has no rows; there are c0, c1, c2"),
    ):
        with refusal(said):
            fit(tiny_model, tmp_path, MemoryExtraction(**settings))
    slots = make_data(template="{instruction} {input}\nCHOICE :")
    with refusal("has no text in front of its first slot"):
        fit(tiny_model, tmp_path, MemoryExtraction(), data=slots)
    with refusal(r"random_secrets=-1 must be at least 0"):
        DiscoverableMemorization(random_secrets=-1)
    with refusal(r"random_secrets=5 is for the exposure of canaries, but Instruction.* none"):
        fit(tiny_model, tmp_path, DiscoverableMemorization(random_secrets=5), data=make_data(canaries=None))
    with refusal(r"nobody trained on, and there are none: set data\.split\.val_share above 0"):
        fit(tiny_model, tmp_path, MembershipInference(), data=make_data(val_share=0.0))


def test_without_canaries_there_is_nothing_to_recover(tiny_model, tmp_path):
    data = make_data(canaries=None)
    fit(tiny_model, tmp_path, attacks()[0], DiscoverableMemorization(), data=data, max_epochs=1)
    [metrics] = found(tmp_path).values()
    assert not [name for name in metrics if "canaries" in name or "exposure" in name]
