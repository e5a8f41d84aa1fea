import pytest
import torch
from adapted import ready
from text_batches import make_sft_batch
from torch import nn

from fedlight.devices.memory import moment_bytes_per_weight
from fedlight.modules.language.optimizers import Optimization, make_optimizer
from fedlight.modules.sft import SFTModule


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer": {"name": "AdmaW"}}, "optimizer.name='AdmaW': did you mean 'AdamW'"),
        ({"optimizer": {"args": {"beta": 1}}}, "did you mean 'betas'"),
        ({"optimizer": {"args": {"lr": 1}}}, "set lr itself"),
        ({"optimizer": {"args": {"betas": 0.9}}}, r"optimizer.args={'betas': 0.9} does not fit AdamW"),
        ({"optimizer": {"args": {"betas": [0.9]}}}, r"optimizer.args={'betas': \[0.9\]} does not fit AdamW"),
        ({"optimizer": {"args": {"betas": [1, 0]}}}, "does not fit AdamW: Invalid beta parameter at index 0"),
        ({"lr": 0}, r"lr=0 must be in \(0, inf\)"),
        ({"optimizer": {"schedule": "cosin"}}, "did you mean 'cosine'"),
        ({"base": "nf8"}, "did you mean 'nf4'"),
        ({"dtype": "float"}, "dtype='float'"),
        ({"lora": {"rank": 0}}, "lora.rank=0"),
        ({"lora": {"dropout": 5}}, "lora.dropout=5"),
        ({"lora": {"targets": []}}, r"lora.targets=\[\] names no layer"),
        ({"merge_adapter": True}, "set adapter to its folder"),
        ({"merge_adapter": True, "adapter": "x", "base": "nf4"}, "save_merged"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_loaded(settings, message):
    with pytest.raises(ValueError, match=message):
        SFTModule("there is no such model", **settings)


def test_arguments_reach_the_optimizer(llama):
    settings = Optimization(args={"betas": [0.9, 0.95], "weight_decay": 0.25})
    module = ready(SFTModule(llama, lr=0.5, optimizer=settings))
    optimizer = module.configure_optimizers()
    assert isinstance(optimizer, torch.optim.AdamW)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.5, (0.9, 0.95), 0.25)
    adapter = {id(weight) for name, weight in module.named_parameters() if "lora_" in name}
    assert {id(weight) for weight in group["params"]} == adapter


def test_cosine_moves_once_per_epoch(llama, make_trainer, loader):
    module = SFTModule(llama, lr=1.0, optimizer=Optimization(schedule="cosine"))
    rates = []

    def record(*_):
        rates.append(module.trainer.optimizers[0].param_groups[0]["lr"])

    module.on_before_optimizer_step = record
    make_trainer(max_epochs=4).fit(module, loader([make_sft_batch(), make_sft_batch()]))
    assert rates == pytest.approx([1, 1, 0.853553, 0.853553, 0.5, 0.5, 0.146447, 0.146447], abs=1e-6)


def test_cosine_without_an_end_is_refused(llama, make_trainer, loader):
    module = SFTModule(llama, optimizer=Optimization(schedule="cosine"))
    with pytest.raises(ValueError, match="max_epochs=-1, set it above 0"):
        make_trainer(max_epochs=-1).fit(module, loader([make_sft_batch()]))


@pytest.mark.parametrize(("name", "expected"), [("AdamW", 8.0), ("SGD", 0.0)])
def test_memory_of_moments_is_that_of_the_class(name, expected):
    assert moment_bytes_per_weight(make_optimizer(name, [nn.Parameter(torch.ones(1))], 0.1, {})) == expected
