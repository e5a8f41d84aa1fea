"""Optimizers by name, and the learning rate per epoch."""

import pytest
import torch

from fedlight.modules.sft import SFTModule


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer": "AdmaW"}, "optimizer='AdmaW': did you mean 'AdamW'"),
        ({"optimizer_args": {"beta": 1}}, "did you mean 'betas'"),
        ({"optimizer_args": {"lr": 1}}, "set lr itself"),
        ({"lr": 0}, r"lr=0 must be in \(0, inf\]"),
        ({"lr_schedule": "cosin"}, "did you mean 'cosine'"),
        ({"base": "nf8"}, "did you mean 'nf4'"),
        ({"dtype": "float"}, "dtype='float'"),
        ({"lora_rank": 0}, "lora_rank=0"),
        ({"lora_dropout": 5}, "lora_dropout=5"),
        ({"merge_adapter": True}, "set adapter to its folder"),
        ({"merge_adapter": True, "adapter": "x", "base": "nf4"}, "save_merged"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_loaded(settings, message):
    with pytest.raises(ValueError, match=message):
        SFTModule("there is no such model", **settings)


def test_arguments_reach_the_optimizer(llama):
    module = SFTModule(llama, lr=0.5, optimizer_args={"betas": [0.9, 0.95], "weight_decay": 0.25})
    module.configure_model()
    optimizer = module.configure_optimizers()
    assert isinstance(optimizer, torch.optim.AdamW)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.5, (0.9, 0.95), 0.25)
    assert {id(weight) for weight in group["params"]} == {
        id(weight) for name, weight in module.named_parameters() if "lora_" in name
    }


def test_cosine_moves_once_per_epoch(llama, make_trainer, loader, make_sft_batch):
    module = SFTModule(llama, lr=1.0, lr_schedule="cosine")
    rates = []

    def record(*_):
        rates.append(module.trainer.optimizers[0].param_groups[0]["lr"])

    module.on_before_optimizer_step = record
    make_trainer(max_epochs=4).fit(module, loader([make_sft_batch(), make_sft_batch()]))
    assert rates == pytest.approx([1, 1, 0.853553, 0.853553, 0.5, 0.5, 0.146447, 0.146447], abs=1e-6)


def test_cosine_without_an_end_is_refused(llama, make_trainer, loader, make_sft_batch):
    with pytest.raises(ValueError, match="max_epochs=-1, set it above 0"):
        make_trainer(max_epochs=-1).fit(SFTModule(llama, lr_schedule="cosine"), loader([make_sft_batch()]))
