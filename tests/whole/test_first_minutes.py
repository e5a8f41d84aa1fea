import os
import subprocess
import sys

import pytest
from tiny_world import fedlight, refused, tiny_recipe, tiny_selector

WIRE = "--federated.channel=Wire"
SHARE = "TopK.share=0.0 of a tensor's values is sent and must be in (0, 1]"


@pytest.fixture
def fit(tiny_model, tmp_path):
    """Runs the tiny selector with more arguments."""
    return lambda *more: fedlight("fit", *tiny_selector(tiny_model, tmp_path / "run", *more))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "accumulate_grad_batches=0",
            "trainer.accumulate_grad_batches=0 must be at least 1: it is batches for",
        ),
        ("gradient_clip_val=-1", "must be at least 0: it is the largest norm"),
        ("check_val_every_n_epoch=0", "trainer.check_val_every_n_epoch=0 must be at least 1"),
        ("log_every_n_steps=-1", "trainer.log_every_n_steps=-1 must be at least 0"),
        ("num_sanity_val_steps=-2", "trainer.num_sanity_val_steps=-2 must be at least -1"),
        ("min_epochs=-1", "trainer.min_epochs=-1 must be at least 0"),
        ("max_epochs=0", "trainer.max_epochs=0: give the number of rounds, at least 1"),
        ("overfit_batches=0.5", "trainer.overfit_batches=0.5 would cut a round of the federation"),
        (
            "devices=2",
            "trainer.devices=2 and trainer.num_nodes=1 make 2 processes, and a federation is trained",
        ),
        ("devices=-1", "trainer with accelerator=cpu, devices=-1: `devices` selected with `CPUAccelerator`"),
        ("precision=half", "trainer.precision: expected a whole number or one of transformer-engine,"),
    ],
)
def test_a_trainer_that_makes_no_sense_is_refused_by_the_name_of_what_was_given(fit, setting, message):
    assert message in refused(fit(f"--trainer.{setting}"))


@pytest.mark.parametrize("setting", ["accumulate_grad_batches=0", "check_val_every_n_epoch=0"])
def test_so_it_is_without_a_federation(fit, setting):
    line = refused(fit("--federated=null", f"--trainer.{setting}"))
    assert f"trainer.{setting} must be at least 1" in line


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_out_of_range(fit, seed):
    line = refused(fit(f"--seed_everything={seed}"))
    assert f"seed_everything={seed} must be at least 0 and below 2**32" in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--federated.aggregation=PrivateMean"],
            "federated.aggregation: PrivateMean needs clip_norm, for example --federated.aggregation.clip_norm 1.0",
        ),
        (
            ["--federated.aggregation=PrivateMean", "--federated.aggregation.clip_norm=1.0"],
            "PrivateMean has federated.aggregation.noise_multiplier=None and federated.aggregation.epsilon=None: give one",
        ),
        (["--federated.fleet=Fleet"], "federated.fleet.devices is empty: name at least one, such as {pixel"),
        ([WIRE, "--federated.channel.up=TopK", "--federated.channel.up.share=0"], SHARE),
        # Or channels of other tests, before or after.
        (["--federated.channel.up=TopK"], "Identity or Wire"),
        (
            [WIRE, "--federated.channel.up=Clip"],
            ".up: there is no class 'Clip'; did you mean 'ClipAndNoise'?",
        ),
        (
            ["--trainer.callbacks+=ClientAccuracy"] * 2,
            "more than one stateful callback of type `ClientAccuracy`",
        ),
        (["--max_epochs=3"], "there is no key 'max_epochs'; did you mean 'trainer.max_epochs'?"),
        (["--data.format.template=x"], "there is no key 'data.format.template'"),
        (["--trianer.max_epochs=3"], "did you mean 'trainer.max_epochs'?"),
        (
            ["selector.yaml"],
            "'selector.yaml' is no key: keys start with two dashes, as in --config selector.y",
        ),
        (["--trainer.gradient_clip_val=much"], "trainer.gradient_clip_val: expected a number, given much"),
        (["--data=SelectorModule"], "data: there is no class 'SelectorModule'"),
        (["--data.format.choice_template=Better: {response_a}"], "choice_template has no slot {response_b}"),
        (["--data.tokenizer=a: b"], "a text with a colon in it is read as a map: write it into a config"),
        (["--data.format.choice_template=Better\n{a}"], "choice_template has no slot {response_a}"),
        (["--model.lora.alpha=0"], "lora.alpha=0.0 must be in (0, inf)"),
        (["--data.source="], "source is empty: give the path of a"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_what_cannot_be_read_is_said_in_one_line(fit, arguments, message):
    assert message in refused(fit(*arguments))


def test_a_second_accelerator_is_left_alone(fit, monkeypatch):
    """Lightning's `auto` would take both, and a federation is one process."""
    from lightning.pytorch.accelerators import CPUAccelerator

    monkeypatch.setattr(CPUAccelerator, "auto_device_count", staticmethod(lambda: 2))
    assert fit("--trainer.max_epochs=1", "--federated.local_steps=1").code == 0
    assert "trainer.devices=2 and" in refused(fit("--trainer.devices=auto"))


def in_a_loop(text: str) -> str:
    return f"federated: {{class_path: fedlight.callbacks.loop.federated_loop.FederatedLoop, init_args: {{{text}}}}}"


def wire(up: str) -> str:
    return in_a_loop(f"channel: {{class_path: Wire, init_args: {{up: {up}}}}}")


TOP_K = "{class_path: TopK, init_args: {share: 0}}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty: selector.yaml is an example"),
        ("# nothing\n", "is empty"),
        ("trainer:\n  max_epochs: 3: 4", "config.yaml', line 2 is no YAML: mapping values are not allowed"),
        ("trainer:\n  max_epochs: !rounds 3", "config.yaml', line 2 is no YAML: could not determine a const"),
        ("? [a, b]\n: 3", "config.yaml', line 1 is no YAML: found unhashable key"),
        ("ckpt_path: 2024-13-45", "config.yaml' is no YAML: month must be in 1..12"),
        ("data: &own [*own]", "config.yaml' is no YAML: maximum recursion depth"),
        ("- a\n- b\n", "holds no keys: write one to a line"),
        ("just text", "holds no keys"),
        ("trainer: {max_epoch: 3}", "there is no key 'trainer.max_epoch'; did you mean"),
        (
            "data: {class_path: PreferenceDataModule, init_args: {format: {template: x}}}",
            "there is no key 'data.format.template'",
        ),
        ("trainer: {callbacks: [{class_path: AdapterExport}]}", "needs folder, for example init_args: {fold"),
        (
            "trainer: {callbacks: [{class_path: RoundProgres}]}",
            "'RoundProgres'; did you mean 'RoundProgress'?",
        ),
        ("trainer: 3", "trainer: expected settings such as --trainer.max_epochs 3, given 3"),
        ("model: 3", "model: expected a LightningModule (its class, or class_path and init_args), given 3"),
        (in_a_loop("aggregation: {class_path: PrivateMean}"), "PrivateMean needs clip_norm"),
        (wire(TOP_K), SHARE),
        (wire(f"[{TOP_K}, {{class_path: Quantize}}]"), SHARE),
        (wire(TOP_K.replace("0", "x")), "up.share: expected a number, given x"),
    ],
)
def test_a_config_that_cannot_be_read(fit, tmp_path, text, message):
    file = tmp_path / "config.yaml"
    file.write_text(text)
    assert message in refused(fit(f"--config={file}"))


def test_a_folder_that_is_none_or_cannot_be_written(fit, tmp_path):
    assert f"config '{tmp_path}' is a folder: give a YAML file" in refused(fit(f"--config={tmp_path}"))
    (tmp_path / "image.yaml").write_bytes(b"\x89PNG\xff")
    assert "is no text in UTF-8" in refused(fit(f"--config={tmp_path / 'image.yaml'}"))
    folder = "--trainer.default_root_dir=/dev/null/run"
    assert f"{folder} cannot be written (Not a directory): choose another folder" in refused(fit(folder))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fot"], "there is no command 'fot'; did you mean 'fit'?"),
        (["xyz"], "there is no command 'xyz'; the commands are fit, validate,"),
        (["--config=x.yaml"], "--config=x.yaml comes after a command, as in fedlight fit --config=x.yaml"),
        (["fit"], "fit needs data and model: give a config, as in fedlight fit --config selector.yaml"),
        (["run", "demo", "round=3"], "the recipe demo has no value 'round'; did you mean 'rounds'?"),
        (["run", "demo", "rounds"], "'rounds' gives no value: write KEY=VALUE, as in rounds=3"),
        (["run"], "the following arguments are required: name; see fedlight run --help"),
        (["run", "demo", "--seeds", "x"], "argument --seeds: invalid int value: 'x'; see fedlight run --h"),
        (["report"], "the following arguments are required: run; see fedlight report --help"),
        (["plan", "--examples", "x"], "argument --examples: invalid int value: 'x'; see fedlight plan --h"),
        (
            ["run", "demo", "--output=/dev/null/x"],
            "/dev/null/x/seed0 cannot be written (Not a directory): ch",
        ),
    ],
    ids=" ".join,
)
def test_a_command_that_cannot_be_read(arguments, message):
    outcome = fedlight(*arguments)
    assert message in refused(outcome)
    assert len(outcome.err.splitlines()) <= 2


def test_a_refusal_inside_a_recipe_comes_through(tiny_model, tmp_path):
    wire = "{class_path: Wire, init_args: {up: {class_path: TopK, init_args: {share: 0}}}}"
    recipe = tiny_recipe(tiny_model, f"stages.selector.with.federated.channel={wire}")
    assert SHARE in refused(fedlight("run", "demo", f"--output={tmp_path}", *recipe))


@pytest.mark.parametrize("arguments", ["--help", "run --help"])
def test_a_reader_who_leaves_ends_it_quietly(arguments):
    """As in ``fedlight --help | true``: a pipe that nobody reads."""
    unread, pipe = os.pipe()
    os.close(unread)
    command = [sys.executable, "-m", "fedlight", *arguments.split()]
    done = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(pipe)
    assert done.returncode in (0, 141)  # argparse swallows it
    assert done.stderr == ""
