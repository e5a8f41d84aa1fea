import pytest
import torch
from tiny_world import fedlight, refused, tiny_selector

from fedlight.modules.dpo import DPOModule
from fedlight.modules.language.data_checks import check_batch
from fedlight.modules.reward import RewardModule
from fedlight.modules.selector import SelectorModule
from fedlight.modules.sft import SFTModule

ANSWERS = {"input_ids": torch.zeros(2, 5), "labels": torch.zeros(2, 5)}
VOTES = {"input_ids": torch.zeros(2, 5), "labels": torch.zeros(2)}
PAIRS = {"chosen": ANSWERS, "rejected": ANSWERS}
OWN = {SFTModule: ANSWERS, SelectorModule: VOTES, DPOModule: PAIRS, RewardModule: PAIRS}


@pytest.mark.parametrize("module", OWN)
@pytest.mark.parametrize("batch", [ANSWERS, VOTES, PAIRS], ids=["answers", "votes", "pairs"])
def test_each_module_takes_its_own_batches_alone(module, batch):
    given = (batch, module.batch_form, module.__name__, module.data_hint)
    if batch is OWN[module]:
        check_batch(*given)
        return
    with pytest.raises(ValueError, match=f"model={module.__name__} reads .*; the batches of this data have"):
        check_batch(*given)


def test_a_batch_that_is_no_map():
    with pytest.raises(ValueError, match="the batches of this data are of type Tensor"):
        check_batch(torch.zeros(2), SFTModule.batch_form, "SFTModule", SFTModule.data_hint)


@pytest.mark.parametrize(
    "command",
    [("fit",), ("validate",), ("test",), *(("fit", f"--federated.clients_at_once={n}") for n in (2, "auto"))],
)
def test_a_config_whose_module_alone_was_changed(tiny_model, tmp_path, command):
    given = [one for one in tiny_selector(tiny_model, tmp_path) if "model.model" not in one]
    line = refused(
        fedlight(command[0], *given, *command[1:], "--model=SFTModule", f"--model.model={tiny_model}")
    )
    assert "model=SFTModule reads answers: data=InstructionDataModule, or PreferenceDataModule" in line
    assert "the batches of this data have 'labels' of shape (" in line
