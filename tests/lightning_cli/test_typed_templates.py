import pytest
from tiny_world import fedlight

from fedlight.lightning_cli import cli
from fedlight.recipes.recipe import load

KEY = "--data.format.generation_template"
WRITTEN = [
    ("Question: {prompt}\nAnswer:", "Question: {prompt}\nAnswer:"),
    (r"Question: {prompt}\nAnswer:", "Question: {prompt}\nAnswer:"),
    ("- {prompt} # 1: 'two' \"three\"", "- {prompt} # 1: 'two' \"three\""),
    ("{prompt}", "{prompt}"),
    ('"{prompt}"', '"{prompt}"'),
    ("[{prompt}]", "[{prompt}]"),
    ("{prompt}: yes?", "{prompt}: yes?"),
    ("toy_generation", "toy_generation"),
]


@pytest.mark.parametrize("form", [f"{KEY}={{}}", "--data.init_args.format.generation_template"])
@pytest.mark.parametrize(("typed", "text"), WRITTEN)
def test_a_typed_template_reaches_the_data_module_as_it_was_written(monkeypatch, typed, text, form):
    words = [form.format(typed)] if "{}" in form else [form, typed]
    seen = []

    def see(name, columns, asks):
        seen.append(name)
        raise ValueError("it is there")

    monkeypatch.setattr("fedlight.datamodules.preferences.datamodule.Template.named", see)
    with pytest.raises(ValueError, match="it is there"):
        cli.lightning_cli(["fit", "--config=sft.yaml", *words])
    assert seen == [text]


def test_a_printed_template_is_the_typed_one_and_other_keys_are_yaml():
    done = fedlight("fit", "--config=sft.yaml", KEY, r"Q: {prompt}\nA:", "--print_config")
    assert "generation_template: 'Q: {prompt}\n\n        A:'" in done.out
    with pytest.raises(SystemExit):
        cli.lightning_cli(["fit", "--config=sft.yaml", f"{KEY}=a: {{prompt}}", "--data.max_tokens=a: 1"])


@pytest.mark.parametrize(("typed", "text"), WRITTEN[:4])
def test_so_does_one_of_a_recipe(typed, text):
    assert load("fedbis", [f"generation_template={typed}"])["generation_template"] == text
