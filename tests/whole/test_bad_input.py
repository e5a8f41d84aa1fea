import errno
import io
import logging
import zipfile
from pathlib import Path

import pytest
import torch
from recipe_runs import ran
from tiny_world import fedlight, make_model, refused, tiny_selector, weights, write_rows


def vote(i, client="c0", choice=None):
    """A vote on two summaries of post i; b wins where i is odd."""
    names = ("anna paints walls", "ben bakes bread", "leo studies birds")
    post = f"{names[i % 3]} . {names[(i + 1) % 3]} . " + "honestly " * i
    answers = {"response_a": f"{names[i % 3]} .", "response_b": f"duh {names[(i + 1) % 3]} ."}
    return {"prompt": post, **answers, "choice": choice or "ab"[i % 2], "client": client}


VOTES = [vote(i, f"c{i % 3}") for i in range(12)]


@pytest.fixture
def fit(tiny_model, tmp_path):
    """Runs the tiny selector with more arguments, on rows of one's own where they are given."""

    def fit(*more, rows=None):
        given = [] if rows is None else [f"--data.source={write_rows(tmp_path / 'rows.jsonl', rows)}"]
        return fedlight("fit", *tiny_selector(tiny_model, tmp_path / "run", *given, *more))

    return fit


@pytest.fixture
def told(fit, caplog):
    """What a run that goes well says of its data."""

    def told(rows, *more):
        with caplog.at_level(logging.INFO):
            outcome = fit(*more, rows=rows)
        assert outcome.code == 0, outcome.err
        return caplog.text

    return told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--data.columns={prompt: post, response_a: a, response_b: b, choice: c}"],
            "no column 'post' (mapp",
        ),
        (["--data.source=votes.jsonl"], "votes.jsonl: no such file. Give the path"),
        (["--data.source=nobody/votes"], "nobody/votes: the hub cannot be reached"),
        (
            ["--model.model=nobody/model", "--data.tokenizer=toy"],
            "model='nobody/model' is no folder here, and",
        ),
        (["--model.model=./model", "--data.tokenizer=toy"], "model='./model': there is no such folder"),
        (["--data.tokenizer=nobody/model"], "tokenizer='nobody/model' is no folder here, and the hub cannot"),
        (
            ["--data.tokenizer=/no/such"],
            "tokenizer='/no/such': there is no such folder; give a folder of save",
        ),
        (["--model.adapter=./adapter"], "adapter='./adapter' has no adapter_config.json"),
        (["--data.max_tokens=20"], "no vote fits into data.init_args.max_tokens=20: raise it"),
        (["--data.format.choices=[zig, zag]"], "Set model.init_args.choices=['zig', 'zag'] to other words"),
        (["--model.choices=[zig, zag]"], "Set model.init_args.choices=['zig', 'zag'] to other words"),
        (["--federated.clients_per_round=7"], "clients_per_round=7 is more than the 6 clients of the data:"),
        (["--federated.clients_per_round=0"], "federated.clients_per_round=0 must be at least 1"),
        (["--trainer.max_steps=3"], "trainer.max_steps=3 would cut a round of the federation: give max_ep"),
        (["--model.base=int9"], "base='int9': did you mean 'int8'?"),
        (
            ["--trainer.callbacks+=ClientExtraction", "--trainer.callbacks.targets=uploads"],
            "trainer.callbacks.targets: expected a list, given uploads",
        ),
        (["--federated.buffered=FedBuff"], "has no setting 'buffered'; did you mean 'fleet.buffered'?"),
        (["--federated.algorithm.weighting=best"], "federated.algorithm.weighting: expected one of unbiased"),
        (["--data.batch_size=two"], "data.batch_size: expected a whole number, given two"),
        (["--data.batch_size=0"], "batch_size=0 must be at least 1"),
        (["--data.partition={by: dirichlet, num_clients: 3}"], "needs the column map to name `category`"),
        (["--data.partition={by: iid, num_clients: 999}"], "a client would be empty. Set num_clients"),
        (
            ["--config=gone.yaml"],
            "config 'gone.yaml': there is no such file; fedlight's own configs are comp",
        ),
        (["--ckpt_path=gone.ckpt"], "checkpoint 'gone.ckpt': there is no such file"),
        (["--trainer.accelerator=abacus"], "accelerator='abacus'"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_cannot_be_meant_is_refused_in_one_line(fit, arguments, message):
    assert message in refused(fit(*arguments))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["fit", "--config=completions.yaml", "--trainer.limit_val_batches=0"],
            "PromptDataModule has no rows to train on: use `fedlight predict`",
        ),
        (
            ["fit", "--config=votes.yaml", "--federated.clients_per_round=2"],
            "CompletionPairDataModule has no rows to train on",
        ),
        (
            ["predict", "--config=feddpo.yaml"],
            "DPOModule answers prompts, and these data have none: take a Prom",
        ),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else "",
)
def test_a_command_for_other_data_is_refused_in_one_line(arguments, message, tiny_model, tmp_path):
    more = (f"--trainer.default_root_dir={tmp_path}", "--trainer.max_epochs=1", "--trainer.accelerator=cpu")
    assert message in refused(fedlight(*arguments, *more, f"--model.model={tiny_model}"))


def test_one_category_says_nothing_to_a_split_by_category(fit):
    rows = [{**row, "kind": "posts"} for row in VOTES]
    columns = {name: name for name in ("prompt", "response_a", "response_b", "choice")} | {"category": "kind"}
    given = (f"--data.columns={columns}", "--data.partition={by: dirichlet, num_clients: 3}")
    assert "every example has the category 'posts'" in refused(fit(*given, rows=rows))


def test_clients_that_always_choose_the_same_side_train(told):
    """A selector sees every pair in both orders, so no client has one label only."""
    assert "3 clients with 3 to 3 pairs" in told([{**row, "choice": "a"} for row in VOTES])


def test_a_client_smaller_than_a_batch_trains_on_what_it_has(told):
    rows = [*VOTES, vote(20, "small")]
    text = told(rows, "--data.batch_size=4", "--federated.clients_per_round=4")
    assert "4 clients with 1 to 3 pairs" in text


def test_small_clients_are_left_out_and_counted_where_wanted(told):
    text = told([*VOTES, vote(20, "small")], "--data.partition={by: client, min_size: 2}")
    assert "3 clients with 3 to 3 pairs" in text
    assert "1 client left out as too small" in text


def test_ties_gaps_repetitions_and_answers_that_do_not_fit_are_left_out_and_counted(told):
    """A client without a decided vote is none."""
    equal = {**VOTES[2], "response_b": VOTES[2]["response_a"]}
    long = {**vote(3, "c0"), "response_a": "honestly " * 90, "response_b": "basically " * 90}
    idle = [vote(12, "idle", "tie"), vote(13, "idle", "tie")]
    text = told([*VOTES, *idle, {**VOTES[0], "response_a": ""}, VOTES[1], equal, long])
    assert "left out: 2 ties, 1 missing, 1 identical, 1 duplicates" in text
    assert "1 too long and left out" in text
    assert "3 clients" in text


@pytest.fixture(scope="module")
def checkpoint(tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    ran("fit", *tiny_selector(tiny_model, folder, "--trainer.max_epochs=1"))
    return folder / "checkpoints/epoch=0.ckpt"


def test_a_checkpoint_of_another_model_is_refused(checkpoint, tmp_path):
    other = make_model(tmp_path / "other", seed=1)
    line = refused(fedlight("fit", *tiny_selector(other, tmp_path / "run"), f"--ckpt_path={checkpoint}"))
    assert "this checkpoint belongs to another model: made on" in line


@pytest.mark.parametrize(
    ("setting", "message"), [("lora.rank=2", "does not fit the module"), ("base=nf4", "another model")]
)
def test_a_checkpoint_of_other_settings_is_refused(fit, checkpoint, setting, message):
    assert message in refused(fit(f"--model.{setting}", f"--ckpt_path={checkpoint}"))


def other_weight(whole):
    """The checkpoint with one bit of its largest tensor changed, which torch loads without a word."""
    with zipfile.ZipFile(io.BytesIO(whole)) as parts:
        tensors = [part for part in parts.infolist() if "/data/" in part.filename]
        largest = max(tensors, key=lambda part: part.file_size)
        content = parts.read(largest)
    place = whole.index(content) + len(content) // 2
    return whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]


@pytest.mark.parametrize("damage", ["cut", "empty", "text", "bit", "zeros", "else"])
@pytest.mark.parametrize("command", ["fit", "test"])
def test_a_damaged_checkpoint_is_refused_before_any_work(tiny_model, checkpoint, tmp_path, damage, command):
    whole, damaged = checkpoint.read_bytes(), tmp_path / "damaged.ckpt"
    contents = {"cut": whole[: len(whole) // 2], "text": b"not a checkpoint", "zeros": bytes(len(whole))}
    damaged.write_bytes(other_weight(whole) if damage == "bit" else contents.get(damage, b""))
    if damage == "else":
        torch.save({"weights": torch.zeros(2)}, damaged)
    line = refused(fedlight(command, *tiny_selector(tiny_model, tmp_path / "run"), f"--ckpt_path={damaged}"))
    assert f"checkpoint '{damaged}'" in line
    assert "use another" in line or "not a checkpoint of Lightning" in line
    assert not (tmp_path / "run").exists()


def no_space(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


class SafetensorError(Exception):
    """As safetensors has it: no OSError, and no number of its own."""


def no_space_for_safetensors(*args, **kwargs):
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


MODULE = "fedlight.modules.language.module.LanguageModule"
WRITERS = {
    "checkpoints": ("lightning.fabric.plugins.io.torch_io._atomic_save", no_space, "run:"),
    "metrics": ("lightning.fabric.loggers.csv_logs._ExperimentWriter.save", no_space, "run:"),
    "visits": ("fedlight.callbacks.loop.round_table.csv_text", no_space, "run/visits.csv:"),
    "adapter": (f"{MODULE}.save_adapter", no_space_for_safetensors, "run/adapter:"),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_full_disk_is_named_and_the_run_goes_on_later(fit, checkpoint, tmp_path, monkeypatch, writer):
    target, fails, named = WRITERS[writer]
    with monkeypatch.context() as full:
        full.setattr(target, fails)
        line = refused(fit())
    assert f"the disk is full while writing {tmp_path}/{named}" in line.replace(": free", ":", 1)
    assert "free some space and give the same command again" in line
    saved = sorted((tmp_path / "run/checkpoints").glob("*.ckpt"))
    going_on = [f"--ckpt_path={saved[-1]}"] if saved else []
    assert fit(*going_on).code == 0
    assert weights(tmp_path / "run")


def test_a_full_disk_in_a_recipe_keeps_what_is_finished(tmp_path, monkeypatch):
    done = []
    monkeypatch.setattr("fedlight.recipes.steps.note", lambda name: done.append(name), raising=False)
    stages = ", ".join(
        f"{name}: {{call: fedlight.recipes.steps.note, with: {{name: {name}}}}}" for name in ("one", "two")
    )
    (tmp_path / "small.yaml").write_text(f"{{seeds: [0], stages: {{{stages}}}}}")
    command = ["run", str(tmp_path / "small.yaml"), f"--output={tmp_path / 'out'}"]
    write = Path.write_bytes
    with monkeypatch.context() as full:
        fails = lambda self, data: no_space() if "two/done.json." in str(self) else write(self, data)  # noqa: E731
        full.setattr(type(tmp_path), "write_bytes", fails)
        line = refused(fedlight(*command))
    assert f"the disk is full while writing {tmp_path}/out/seed0/two/done.json: free some space" in line
    ran(*command)
    assert done == ["one", "two", "two"]
