import pytest

from fedlight.lightning_cli import full_keys
from fedlight.lightning_cli.cli import lightning_cli


@pytest.mark.parametrize(
    "message",
    ["model='a' fails", "model=['a'", "lr=1.55 is odd", "a model='c'", "x.model='b'", "nothing", "set model"],
)
def test_a_message_that_names_no_single_place_stays(message):
    config = {"x": {"model": "a"}, "y": {"model": "a"}, "z": {"model": "b", "lr": 1.5}}
    assert full_keys.with_full_key(message, config) == message


@pytest.mark.parametrize(
    ("arguments", "start"),
    [
        (["selector.yaml", "--model.base=int9"], "model.init_args.base='int9'"),
        (["selector.yaml", "--model.model=./none", "--data.tokenizer=toy"], "model.init_args.model='./none'"),
        (
            [
                "selector.yaml",
                "--data.format.form=features",
                "--data.format.twins_together=false",
                "--data.format.encoder=./none",
            ],
            "data.init_args.format.encoder='./none'",
        ),
        (["selector.yaml", "--data.tokenizer=/none"], "data.init_args.tokenizer='/none'"),
        (
            [
                "feddca.yaml",
                "--data.augmentation.encoder=SentenceEncoder",
                "--data.augmentation.encoder.model=./none",
            ],
            "data.init_args.augmentation.init_args.encoder.init_args.model='./none'",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_refusal_begins_with_the_key_under_which_the_value_is_set(tmp_path, arguments, start):
    here = (f"--trainer.default_root_dir={tmp_path}", "--trainer.accelerator=cpu")
    with pytest.raises((ValueError, OSError)) as refused:
        lightning_cli(["fit", "--config", *arguments, *here])
    assert str(refused.value).startswith(start)
