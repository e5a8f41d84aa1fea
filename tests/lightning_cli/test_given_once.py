import pytest
from tiny_world import fedlight, refused, tiny_selector

from fedlight.lightning_cli.cli import ReadSettings

TOY = ["--model=SelectorModule", "--model.model=toy"]
VOTES = ["--data=PreferenceDataModule", "--data.source=toy:votes"]


def settings(*arguments):
    return ReadSettings(["fit", *arguments]).config["fit"]


@pytest.mark.parametrize("where", ["model", "data.format"])
def test_choices_are_those_of_either(where):
    found = settings(*TOY, *VOTES, f"--{where}.choices=[x, y]")
    assert list(found.model.init_args.choices) == list(found.data.init_args.format.choices) == ["x", "y"]


def test_the_tokenizer_is_the_models_where_a_module_has_one():
    model = ["--model=SelectorModule", "--model.model=some/model"]
    assert settings(*model, *VOTES).data.init_args.tokenizer == "some/model"
    assert settings(*model, *VOTES, "--data.tokenizer=other").data.init_args.tokenizer == "other"
    features = ("--model=FeatureSelectorModule", "--model.dimension=4")
    found = settings(*features, *VOTES, "--data.format.choices=[x, y]")
    assert found.data.init_args.tokenizer == "toy"
    assert "choices" not in found.model.init_args


def test_choices_that_contradict_each_other_are_refused(tiny_model, tmp_path):
    given = ["--model.choices=[A, B]", "--data.format.choices=[x, y]"]
    assert list(settings(*TOY, *VOTES, *given).model.init_args.choices) == ["x", "y"]
    given = ["--model.choices=[c, d]", "--data.format.choices=[x, y]"]
    told = "model.init_args.choices=['c', 'd'] and data.init_args.format.choices=['x', 'y'] have to be the"
    assert told in refused(fedlight("fit", *tiny_selector(tiny_model, tmp_path), *given))
