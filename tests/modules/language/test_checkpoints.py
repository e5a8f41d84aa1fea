import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from adapted import same
from text_batches import make_pair_batch, make_sft_batch

from fedlight.modules.dpo import DPOModule
from fedlight.modules.language.adapters import Lora
from fedlight.modules.language.module import LanguageModule
from fedlight.modules.language.optimizers import Optimization
from fedlight.modules.reward import RewardModule
from fedlight.modules.sft import SFTModule
from fedlight.support.checkpoint_files import check_readable, newest_checkpoint

ROOT = Path(__file__).parents[3]
COSINE = Optimization(schedule="cosine")


def test_a_checkpoint_holds_the_adapter_alone(trained):
    module, path = trained
    checkpoint = torch.load(path, weights_only=True)
    assert all("lora_" in name for name in checkpoint["state_dict"])
    assert len(checkpoint["state_dict"]) == 2 * 7 * 2
    assert checkpoint["base_model"] == {"model": module.hparams.model, "base": "plain", **module.base}


@pytest.mark.slow
def test_reload_in_a_fresh_process(trained):
    module, path = trained
    code = (
        "import sys; from fedlight.modules.language.module import LanguageModule\n"
        "print(LanguageModule.load_from_checkpoint(sys.argv[1]).generate(['the cat'], temperature=0, max_new_tokens=6))"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
    output = subprocess.run(
        [sys.executable, "-c", code, str(path)], cwd=ROOT, env=environment, capture_output=True, check=True
    ).stdout.decode()
    assert output.splitlines()[-1] == str(module.generate(["the cat"], temperature=0, max_new_tokens=6))


def test_a_checkpoint_follows_a_model_that_moved(trained, llama, tmp_path):
    module, path = trained
    moved = tmp_path / "moved"
    moved.symlink_to(llama)
    assert same(module.state_dict(), SFTModule.load_from_checkpoint(path, model=str(moved)).state_dict())


def test_a_checkpoint_of_another_model(trained, other_llama):
    _, path = trained
    with pytest.raises(ValueError, match="this checkpoint belongs to another model: made on"):
        SFTModule.load_from_checkpoint(path, model=other_llama)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"lora": Lora(rank=4)}, r"is \(8, 64\) in the checkpoint and \(4, 64\) here \(and 27 more\)"),
        ({"lora": Lora(targets=["q_proj"])}, "is not in the module"),
        ({"num_adapters": 3}, "set num_adapters, lora, adapter"),
    ],
)
def test_a_checkpoint_of_other_adapters(trained, settings, said):
    with pytest.raises(ValueError, match=said):
        SFTModule.load_from_checkpoint(trained[1], **settings)


def test_a_damaged_checkpoint(trained):
    _, path = trained
    content = path.read_bytes()
    for damaged in (content[: len(content) // 2], b"", b"text"):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="is damaged or no checkpoint"):
            SFTModule.load_from_checkpoint(path)
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        SFTModule.load_from_checkpoint(path.with_name("y.ckpt"))
    torch.save({"weights": 1}, path)
    with pytest.raises(ValueError, match="has no state_dict"):
        SFTModule.load_from_checkpoint(path)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        *((SFTModule, {"base": base, "lr": 1e-2, "optimizer": COSINE}) for base in ("plain", "int8", "nf4")),
        (DPOModule, {"lr": 1e-3, "beta": 0.5}),
        (RewardModule, {"lr": 1e-3}),
    ],
)
def test_resumed_equals_uninterrupted(
    llama, kind, settings, make_trainer, loader, keep_every_epoch, tmp_path
):
    make_batch = make_sft_batch if kind is SFTModule else make_pair_batch
    batches, settings = [make_batch(seed=seed) for seed in range(3)], {"lora": Lora(dropout=0.3), **settings}
    whole = kind(llama, **settings)
    make_trainer(max_epochs=3, callbacks=[keep_every_epoch]).fit(whole, loader(batches))
    for epoch in range(2):
        torch.manual_seed(epoch)
        resumed = kind(llama, **settings)
        path = tmp_path / f"{epoch}.ckpt"
        make_trainer(max_epochs=3).fit(resumed, loader(batches), ckpt_path=path, weights_only=True)
        assert same(whole.state_dict(), resumed.state_dict())
        assert kind is not DPOModule or whole._reference == resumed._reference


@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
def test_a_checkpoint_made_under_the_command_line(llama, loader, tmp_path, monkeypatch):
    from lightning.pytorch.cli import LightningCLI

    monkeypatch.setattr(sys, "argv", ["fedlight"])
    quiet = dict.fromkeys(
        ["logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"], False
    )
    cli = LightningCLI(
        LanguageModule,
        subclass_mode_model=True,
        run=False,
        save_config_callback=None,
        seed_everything_default=0,
        trainer_defaults=quiet | {"accelerator": "cpu", "max_epochs": 1, "default_root_dir": str(tmp_path)},
        args=[
            "--model=fedlight.modules.dpo.DPOModule",
            f"--model.model={llama}",
            "--model.lora.targets=[q_proj]",
            "--model.completions.max_new_tokens=5",
        ],
    )
    assert (cli.model.hparams.beta, cli.model.hparams.optimizer["name"]) == (0.1, "RMSprop")
    cli.trainer.predict(cli.model, loader([{"prompt": ["the cat"]}]))
    cli.trainer.save_checkpoint(tmp_path / "x.ckpt")
    again = LanguageModule.load_from_checkpoint(tmp_path / "x.ckpt")
    assert again.hparams.lora["targets"] == ["q_proj"]
    assert same(cli.model.state_dict(), again.state_dict())


def test_what_training_cannot_go_on_from_is_passed_over(tmp_path, capsys):
    whole = {"state_dict": {}, "optimizer_states": [], "callbacks": {"FederatedLoop": {"rounds_done": 1}}}
    for age, (name, content) in enumerate(
        {"weights": {"state_dict": {}}, "other": {"optimizer_states": []}, "good": whole}.items()
    ):
        torch.save(content, tmp_path / f"{name}.ckpt")
        os.utime(tmp_path / f"{name}.ckpt", (9 - age, 9 - age))
    check_readable(tmp_path / "weights.ckpt")  # good for evaluation
    assert newest_checkpoint(tmp_path.iterdir()) == tmp_path / "good.ckpt"
    lines = capsys.readouterr().err.splitlines()
    assert [line.startswith("passed over: checkpoint '") for line in lines] == [True, True]
    assert "has the weights alone" in lines[0]
    assert "has no state_dict" in lines[1]


def test_of_checkpoints_of_one_tick_the_last_round_is_the_newest(tmp_path):
    for name in ("epoch=9-step=90", "epoch=10-step=100", "epoch=8-step=80"):
        torch.save({"state_dict": {}, "optimizer_states": []}, tmp_path / f"{name}.ckpt")
        os.utime(tmp_path / f"{name}.ckpt", (9, 9))
    assert newest_checkpoint(tmp_path.iterdir()) == tmp_path / "epoch=10-step=100.ckpt"
