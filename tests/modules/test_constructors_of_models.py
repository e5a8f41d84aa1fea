import re

import pytest

from fedlight import DPOModule, Lora, SFTModule
from fedlight.conf import path
from fedlight.generators.endpoint import ChatEndpoint
from fedlight.lightning_cli.cli import ReadSettings


def read(config, *arguments):
    return ReadSettings(["fit", f"--config={path(config)}", *arguments]).config["fit"]


def test_a_part_of_nested_settings_leaves_the_others_at_their_defaults():
    arguments = (
        "--model=DPOModule",
        "--model.model=toy",
        "--model.lora.rank=4",
        "--model.optimizer.schedule=cosine",
    )
    made = read("selector.yaml", *arguments)["model"]["init_args"]
    assert (made["lora"]["rank"], made["lora"]["alpha"], made["lora"]["dropout"]) == (4, 16, 0.05)
    assert (made["optimizer"]["name"], made["optimizer"]["schedule"]) == ("RMSprop", "cosine")


def test_settings_in_a_checkpoint_are_plain_and_make_the_same_module():
    module = DPOModule("toy", lora=Lora(rank=4))
    saved = dict(module.hparams)
    assert saved["lora"] == {"rank": 4, "alpha": 16, "dropout": 0.05, "targets": "all-linear"}
    assert saved["optimizer"] == {"name": "RMSprop", "args": None, "schedule": "constant"}
    assert dict(DPOModule(**saved).hparams) == saved


def test_a_map_with_a_wrong_name_is_refused():
    with pytest.raises(TypeError, match="rnk"):
        SFTModule("toy", lora={"rnk": 4})
    with pytest.raises(ValueError, match="budget"):
        ChatEndpoint("http://localhost:1/v1", "m", budget={"max_requests": 1})


@pytest.mark.parametrize(
    ("beside", "place"),
    {
        "model.lora_rank=4": "lora.rank",
        "model.lora_targets=all-linear": "lora.targets",
        "model.schedule=cosine": "optimizer.schedule",
        "model.temperature=0": "completions.temperature",
        "model.gradient_checkpointing=true": "execution.gradient_checkpointing",
        "data.synthesis.instruction_demonstrations=4": "instructions.demonstrations",
        "data.synthesis.instruction_tries=40": "instructions.tries",
        "data.synthesis.refusals=[No]": "instructions.refusals",
        "data.synthesis.prompts.instruction_begin=a": "instruction.begin",
        "data.synthesis.prompts.no_input=none": "response.no_input",
    }.items(),
)
def test_a_setting_beside_the_one_that_has_it_is_refused_with_its_place(beside, place, capsys):
    with pytest.raises(SystemExit):
        read("fewfedpit.yaml" if "synthesis" in beside else "selector.yaml", f"--{beside}")
    told = capsys.readouterr().err
    assert re.split("[.=]", beside)[-2] in told
    assert f"did you mean '{place}'?" in told


@pytest.mark.parametrize(
    ("given", "place"),
    {"optimizer=SGD": "model.optimizer.name", "completions=4": "model.completions.number"}.items(),
)
def test_a_setting_that_others_stand_below_is_no_value(given, place, capsys):
    with pytest.raises(SystemExit):
        read("selector.yaml", f"--model.{given}")
    assert f"it has settings below it: give --{place}={given.partition('=')[2]}" in capsys.readouterr().err


def test_a_part_of_the_settings_of_self_generation_leaves_the_others_at_their_defaults():
    arguments = "--data.synthesis=SelfGeneration", "--data.synthesis.responses.tries=2"
    made = read("fewfedpit_llama2.yaml", *arguments)["data"]["init_args"]["synthesis"]["init_args"]
    assert dict(made["responses"]) == {"demonstrations": 4, "max_new_tokens": 256, "tries": 2}
    assert (made["instructions"]["demonstrations"], made["instructions"]["min_words"]) == (8, 3)
