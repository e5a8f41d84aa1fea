"""A run with ``template: chat`` is exported and talked with in its tokenizer's chat template."""

import io
import json
import shutil
import sys

import numpy as np
import pytest
import yaml
from tiny_world import fedlight

from fedlight.datamodules.text.encoding import Comparison
from fedlight.export.opened import open_run
from fedlight.export.vote import SETTINGS, Selectors
from fedlight.judges.selector_judge import SelectorJudge

TEMPLATE = (
    "{% for m in messages %}<s> {{ m.role }} : {{ m.content }} </s> {% endfor %}"
    "{% if add_generation_prompt %}<s> assistant :{% endif %}"
)


@pytest.fixture(scope="module")
def chatty(base, tmp_path_factory):
    """The base with a chat template."""
    folder = tmp_path_factory.mktemp("chatty") / "base"
    shutil.copytree(base, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    return str(folder)


def changed(folder, to, model, **data):
    """A copy of a run as if it had been with this model and these settings of the data."""
    shutil.copytree(folder, to)
    for file in to.glob("metrics/version_*/config.yaml"):
        config = yaml.safe_load(file.read_text())
        config["model"]["init_args"]["model"] = model
        of_data = config["data"]["init_args"]
        for key, value in data.items():
            (of_data["format"] if key in of_data["format"] else of_data)[key] = value
        file.write_text(yaml.safe_dump(config))
    return to


def exported(own, folder):
    done = fedlight("export", str(own), f"--output={folder}")
    assert done.code == 0, done.err
    return folder


@pytest.mark.parametrize(
    ("columns", "asked"),
    [
        ({}, "prompt"),
        ({"columns": {"messages": "messages.:-1", "chosen": "chosen", "rejected": "rejected"}}, "question"),
    ],
)
def test_the_card_shows_the_chat_template(run, chatty, tmp_path, columns, asked):
    own = changed(run, tmp_path / "own", chatty, generation_template="chat", **columns)
    card = (exported(own, tmp_path / "out") / "README.md").read_text()
    assert f"```text\n<s> user : {{{asked}}} </s> <s> assistant :\n```" in card
    assert "`tokenizer.apply_chat_template`" in card


def test_lines_are_asked_in_the_chat_template(run, chatty, tmp_path, monkeypatch):
    own = changed(run, tmp_path / "own", chatty, generation_template="chat")
    monkeypatch.setattr(sys, "stdin", io.StringIO("carla sounds\n"))
    monkeypatch.setenv("COLUMNS", "90")
    done = fedlight("chat", str(own), "--max-new-tokens", "4")
    assert done.code == 0, done.err
    module, turns = open_run(own).load(), [{"role": "user", "content": "carla sounds"}]
    asked = module.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    [[tuned]] = module.generate([asked], n=1, temperature=0.0, max_new_tokens=4)
    assert " ".join(tuned.split()) in " ".join(done.out.split())


def test_an_exported_selector_reads_the_chat_template(selectors, chatty, tmp_path):
    template = "chat:POST : {post}\nA : {response_a}\nB : {response_b}\nCHOICE :"
    out = exported(changed(selectors, tmp_path / "own", chatty, choice_template=template), tmp_path / "out")
    settings = json.loads((out / SETTINGS).read_text())
    assert settings["is_chat"]
    assert settings["template"].startswith("<s> user : POST : {post}\nA : {response_a}")
    assert settings["template"].endswith("{response_b} </s> <s> assistant : CHOICE :")
    pair = Comparison({"post": "anna bakes bread"}, "bees rambles", "carla sounds")
    judge = SelectorJudge(str(out), chatty, choice_template=template, dtype="fp32")
    found = Selectors(out, chatty).log_probs({"post": " anna bakes bread"}, pair.first, pair.second)
    assert judge.log_probs([pair])[:, 0] == pytest.approx(np.array(found), abs=1e-5)
