import pytest
from tiny_world import fedlight, refused, tiny_selector

from fedlight.lightning_cli.config_files import check_config


def written(folder, text):
    file = folder / "mine.yaml"
    file.write_text(text)
    return str(file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "trainer: {x: 3}\ntrainer: {y: 4}\n",
            "line 2 gives trainer a second time: YAML would take the last",
        ),
        ("trainer:\n  callbacks:\n    - init_args: {a: 1, b: 2, a: 3}\n", "line 3 gives trainer.callbacks.i"),
        ("stages: {one: {fit: selector.yaml}}\n", "is a recipe: run it with fedlight run"),
    ],
)
def test_what_yaml_would_take_and_nobody_means(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        check_config(written(tmp_path, text))


def test_the_same_key_in_several_maps_is_meant_and_a_config_has_an_ending(tmp_path):
    text = "model: {init_args: {seed: 1}}\ndata: {init_args: {seed: 1}}\ncallbacks: [{a: 1}, {a: 2}]\n"
    check_config(written(tmp_path, text))
    with pytest.raises(ValueError, match=r"'selector': there is no such file; did you mean 'selector\.yaml"):
        check_config("selector")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("${trainer.nothing}", ": Interpolation key 'trainer.nothing' not found; "),
        ("${trainer.default_root_dir}/x", ": Interpolation key 'trainer.default_root_dir' not found; "),
        ("${trainer", "trainer.default_root_dir: the reference in it cannot be read; "),
        ("${oc.env:FEDLIGHT_NO_SUCH}", "Environment variable 'FEDLIGHT_NO_SUCH' not found; "),
    ],
)
def test_references_that_lead_nowhere(tiny_model, tmp_path, monkeypatch, value, message):
    monkeypatch.chdir(tmp_path)
    line = refused(fedlight("fit", *tiny_selector(tiny_model, value)))
    assert message in line
    assert "a reference is written as ${trainer.max_epochs}" in line
    assert "full_key" not in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--federated=none"], "federated: none is no class; to leave it out write null"),
        (["--federated.fleet=gone.yaml"], "federated.fleet: there is no file 'gone.yaml': give the path"),
        (["--trainer.precision=8"], "expected one of 64, 32, 16, transformer-engine,"),
        (["--ckpt_path=mine.json"], "checkpoint 'mine.json' is damaged or no checkpoint"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_values_that_name_nothing(tiny_model, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.json").write_text("[1]")
    line = refused(fedlight("fit", *tiny_selector(tiny_model, tmp_path / "run", *arguments)))
    assert message in line
    assert line.count(" 64,") <= 1
    assert not (tmp_path / "run").exists()
