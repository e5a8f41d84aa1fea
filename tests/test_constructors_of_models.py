"""Constructors of modules and generators: few arguments, nested ones of which a part may be given, former names told."""

import inspect
import re

import pytest

import fedlight
from fedlight import DPOModule, Lora, SFTModule
from fedlight.conf import path
from fedlight.generators.endpoint import ChatEndpoint
from fedlight.lightning_cli.cli import ReadSettings

MOST = 12
CLASSES = (
    "SFTModule",
    "DPOModule",
    "SelectorModule",
    "RewardModule",
    "FeatureSelectorModule",
    "ProjectorModule",
)
OTHERS = ("ChatEndpoint", "LocalGenerator", "LESS")


def settings_of(*arguments):
    return ReadSettings(["fit", f"--config={path('selector.yaml')}", *arguments]).config["fit"]["model"][
        "init_args"
    ]


@pytest.mark.parametrize("name", [*CLASSES, *OTHERS])
def test_a_constructor_has_few_arguments(name):
    names = [each for each in inspect.signature(getattr(fedlight, name)).parameters if each != "kwargs"]
    assert len(names) <= MOST, names


def test_a_part_of_nested_settings_leaves_the_others_at_their_defaults():
    made = settings_of(
        "--model=DPOModule", "--model.model=toy", "--model.lora.rank=4", "--model.optimizer.schedule=cosine"
    )
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
    ("former", "place"),
    {
        "lora_rank=4": "lora.rank",
        "lora_targets=all-linear": "lora.targets",
        "optimizer_args.weight_decay=0": "optimizer.args",
        "lr_schedule=cosine": "optimizer.schedule",
        "temperature=0": "completions.temperature",
        "gradient_checkpointing=true": "execution.gradient_checkpointing",
    }.items(),
)
def test_a_former_setting_is_refused_with_its_new_place(former, place, capsys):
    name = re.split("[.=]", former)[0]
    with pytest.raises(SystemExit):
        settings_of(f"--model.{former}")
    told = capsys.readouterr().err
    assert name in told
    assert f"any more: it is {place}" in told


@pytest.mark.parametrize(
    ("given", "place"),
    {"optimizer=SGD": "model.optimizer.name", "completions=4": "model.completions.number"}.items(),
)
def test_a_setting_that_others_stand_below_is_no_value(given, place, capsys):
    with pytest.raises(SystemExit):
        settings_of(f"--model.{given}")
    assert f"it has settings below it: give --{place}={given.partition('=')[2]}" in capsys.readouterr().err
