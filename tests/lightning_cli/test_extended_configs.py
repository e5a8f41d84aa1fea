import pytest
from omegaconf import OmegaConf
from recipe_runs import ran
from tiny_world import fedlight, refused, table, write_rows

from fedlight import conf
from fedlight.lightning_cli.config_files import layers, with_layers
from fedlight.recipes.overlay import as_yaml
from fedlight.recipes.stages import settings_in

ON_METHODS = ("selector", "fedbiscuit", "feddca", "fewfedpit")
WORDS = ("tea", "soup", "rice", "bread", "cake", "milk")


def write(folder, **configs):
    folder.mkdir(exist_ok=True)
    for name, text in configs.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder


def test_what_is_extended_comes_first_once_and_beside_its_config(tmp_path):
    write(tmp_path, a="seed_everything: 1\n", b="extends: a.yaml\nseed_everything: 2\n")
    write(tmp_path / "own", c="extends: [../a.yaml, ../b.yaml, selector.yaml]\n")
    found = [file.resolve() for file in layers(str(tmp_path / "own/c.yaml"))]
    own = [conf.path("methods/fedbis.yaml"), conf.path("selector.yaml")]
    assert found == [*(tmp_path / name for name in ("a.yaml", "b.yaml")), *own, tmp_path / "own/c.yaml"]


def test_a_command_line_has_them_in_place_of_the_config(tmp_path):
    write(tmp_path, a="seed_everything: 1\n", b="extends: a.yaml\n")
    a, b = tmp_path / "a.yaml", tmp_path / "b.yaml"
    both = [f"--config={a}", f"--config={b}", "--extends=null"]
    assert with_layers(["fit", "--config", str(b), "--x=1"]) == ["fit", *both, "--x=1"]
    assert with_layers(["fit", "--config", str(a), "--config", str(b)]) == ["fit", *both]
    assert with_layers(["fit", f"-c={a}", "--config"]) == ["fit", f"-c={a}", "--config"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("extends: b.yaml\n", r"extends 'a\.yaml', which extends it in turn"),
        ("extends: nothing.yaml\n", r"config '.*nothing\.yaml': there is no such file"),
        ("extends: {a: 1}\n", r"extends=\{'a': 1\} has to be the name of a config"),
        ("extends: [1]\n", r"extends=\[1\] has to be the name of a config"),
        ("extends: recipes/demo.yaml\n", "is a recipe"),
    ],
)
def test_what_cannot_be_extended_is_named(tmp_path, text, message):
    write(tmp_path, a=text, b="extends: a.yaml\n")
    with pytest.raises(ValueError, match=message):
        layers(str(tmp_path / "a.yaml"))


def test_on_the_command_line_it_is_no_key():
    given = ("--config", "selector.yaml", "--extends", "feddca.yaml")
    assert "--config twice" in refused(fedlight("fit", *given))


@pytest.mark.parametrize("name", ON_METHODS)
def test_recipes_and_commands_read_the_same(name, tmp_path):
    """A recipe merges the files itself; a command leaves it to its parser."""
    whole = tmp_path / "whole.yaml"
    whole.write_text(as_yaml(settings_in(f"{name}.yaml")))
    configs = (str(whole), f"{name}.yaml")
    printed = [fedlight("fit", "--config", config, "--print_config").out for config in configs]
    assert "max_epochs" in printed[0]
    assert printed[0] == printed[1]


@pytest.mark.usefixtures("any_text")
@pytest.mark.parametrize("method", ["fedbis", "fedbiscuit", "feddca", "fewfedpit"])
def test_data_and_model_are_enough_on_top_of_a_method(method, tiny_model, tmp_path):
    """Nothing of the embedded world is left in the run: neither its callbacks nor its texts."""
    if method in ("fedbis", "fedbiscuit"):
        rows = [
            {"ask": f"q {n}", "left": one, "right": other, "pick": "l" if n % 3 else "r", "who": f"c{n % 4}"}
            for n, (one, other) in enumerate(zip(WORDS * 10, WORDS[1:] * 12, strict=True))
        ]
        columns = {"prompt": "ask", "response_a": "left", "response_b": "right", "choice": "pick"}
        template = "Q: {prompt}\nA: {response_a}\nB: {response_b}\nBetter:"
        form = {"choice_values": {"a": "l", "b": "r"}, "choice_template": template}
        data = {"columns": columns | {"client": "who"}, "format": form}
    else:
        rows = [{"ask": f"what is {WORDS[n % 6]} {n}", "say": "food", "who": f"c{n % 4}"} for n in range(60)]
        columns = {"instruction": "ask", "response": "say", "client": "who"}
        data = {"columns": columns, "template": "Q: {instruction}\nA:"}
        if method == "feddca":
            data |= {"private_rows": 40, "public_columns": {"instruction": "ask", "response": "say"}}
    mine = {
        "extends": f"methods/{method}.yaml",
        "model": {"init_args": {"model": tiny_model}},
        "data": {"init_args": {"source": write_rows(tmp_path / "rows.jsonl", rows), **data}},
    }
    OmegaConf.save(OmegaConf.create(mine), tmp_path / "mine.yaml")
    short = ["--trainer.max_epochs=1", "--federated.clients_per_round=2", "--trainer.accelerator=cpu"]
    made = "--data.synthesis.number=1 --data.synthesis.responses.max_new_tokens=3 --data.max_tokens=64"
    of_method = {"feddca": "--data.augmentation.number=3 --data.max_tokens=64", "fewfedpit": made}
    of_method["fedbiscuit"] = "--federated.algorithm.warmup_rounds=0"
    short += of_method.get(method, "").split()
    folder = tmp_path / "run"
    ran("fit", "--config", str(tmp_path / "mine.yaml"), f"--trainer.default_root_dir={folder}", *short)
    assert len({row["client"] for row in table(folder / "visits.csv")}) == 2
    saved = (folder / "metrics/version_0/config.yaml").read_text()
    # The default of a template that selectors do not read.
    of_toy = {line.strip() for line in saved.splitlines() if "toy" in line}
    assert of_toy <= {"generation_template: toy_generation"}
    assert "extends: null" in saved
