import re
from dataclasses import replace

import pytest
from huggingface_hub import ModelCard
from tiny_world import fedlight, make_model, tiny_selector

from fedlight import FedBiscuit, SelectorModule
from fedlight.callbacks.export.card_facts import (
    CardFacts,
    Privacy,
    Score,
    papers_of,
    privacy_of,
    public_name,
    scores_of,
    traffic_of,
)
from fedlight.callbacks.export.model_card import adapter_use, card_text, write_card
from fedlight.pretrained.hub import find_licence

FACTS = CardFacts(
    module="SelectorModule",
    base="owner/name",
    algorithm="FedBiscuit",
    papers=papers_of([SelectorModule, FedBiscuit]),
    base_form="nf4",
    licence="mit",
    source="votes.jsonl",
    clients=12,
    examples=3456,
    rounds=27,
    bytes_down=2_100_000,
    bytes_up=999,
    simulated_seconds=5400.0,
    privacy=[Privacy("the server", 3.5, 1e-5)],
    scores=[Score("val/accuracy", 0.71, 0.65, 0.77), Score("val/loss", 0.6)],
    settings={"learning rate": 0.003},
    command="fedlight fit --config fedbiscuit.yaml",
    versions={"fedlight": "0.1.0"},
)


def test_a_card_says_method_data_cost_privacy_scores_and_licence():
    lines = card_text(FACTS, "3 LoRA adapters", "Load them.").splitlines()
    for line in (
        "| method | SelectorModule (https://arxiv.org/abs/2407.03038) |",
        "| federated algorithm | FedBiscuit (https://arxiv.org/abs/2407.03038) |",
        "| base model | owner/name, trained on its nf4 form |",
        "| licence of the base | mit |",
        "| data | votes.jsonl; 12 clients, 3,456 training examples |",
        "| rounds | 27 |",
        "| sent to clients in visits | 2.1 MB |",
        "| sent by clients in visits | 999 bytes |",
        "| simulated time on devices | 1.5 hours |",
        "| differential privacy | epsilon 3.5 at delta 1e-05 towards the server |",
        "| learning rate | 0.003 |",
        "| command | `fedlight fit --config fedbiscuit.yaml` |",
        "| val/accuracy | 0.71 | 0.65 to 0.77 |",
        "| val/loss | 0.6 |  |",
    ):
        assert line in lines


POOLED = CardFacts("SFTModule", "owner/name", rounds=3)


@pytest.mark.parametrize(
    ("facts", "line"),
    [
        (
            replace(FACTS, added=456),
            "; 12 clients, 3,456 training examples, 456 of them added to the clients' own |",
        ),
        (CardFacts("SFTModule", "owner/name", "FedAvg"), "| differential privacy | none |"),
        (POOLED, "| federated algorithm | none: trained on pooled data |"),
        (POOLED, "| epochs | 3 |"),
    ],
    ids=["added examples", "no guarantee", "no federation", "epochs"],
)
def test_a_card_tells_what_is_not_as_usual(facts, line):
    assert line in card_text(facts, "LoRA adapter", "")


def test_the_hub_reads_the_head(tmp_path):
    write_card(FACTS, tmp_path, what="LoRA adapter", use="Load it.")
    data = ModelCard.load(tmp_path / "README.md").data
    assert (data.base_model, data.license, data.library_name) == ("owner/name", "mit", "peft")
    assert data.pipeline_tag == "text-generation"
    assert data.tags == ["federated-learning", "fedlight", "lora"]


@pytest.mark.parametrize(
    "name", ["/home/me/models/llama", "~/llama", "C:\\models\\llama", "../models/llama", "llama"]
)
def test_folders_are_no_part_of_a_name(name):
    assert public_name(name) == "llama"


def test_a_folder_with_the_form_of_a_hub_name_is_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert public_name("secret/llama") == "secret/llama"
    (tmp_path / "secret/llama").mkdir(parents=True)
    assert public_name("secret/llama") == "llama"


def test_a_base_in_a_folder_is_no_name_at_the_hub(tmp_path):
    write_card(CardFacts("SFTModule", public_name("/home/me/llama")), tmp_path, what="LoRA adapter", use="")
    assert ModelCard.load(tmp_path / "README.md").data.base_model is None


def test_only_metrics_of_the_global_model_are_scores():
    last = {
        "train/loss": 1.0,
        "fed/bytes_up": 2.0,
        "win_rate": 0.6,
        "win_rate_low": 0.5,
        "win_rate_high": 0.7,
    }
    assert scores_of(last | {"test/f_low": 0.1, "val/loss": float("nan")}) == [
        Score("test/f_low", 0.1),  # no end of an interval, as there is no test/f
        Score("win_rate", 0.6, 0.5, 0.7),
    ]


def test_both_ends_of_privacy_are_named():
    last = {"fed/epsilon": 1.0, "fed/delta": 1e-5, "fed/epsilon_local": 9.0, "fed/delta_local": 1e-6}
    assert privacy_of(last) == [
        Privacy("observers of the models", 1.0, 1e-5),
        Privacy("the server", 9.0, 1e-6),
    ]
    assert privacy_of({"fed/epsilon": 1.0}) == []


def test_traffic_is_the_sum_over_visits_and_time_their_latest_end():
    rows = [{"bytes_down": "5", "bytes_up": "1", "round_end_seconds": end} for end in ("60.0", "20.5")]
    assert traffic_of(rows) == {"bytes_down": 10, "bytes_up": 2, "simulated_seconds": 60.0}


@pytest.mark.parametrize(
    ("card", "licence"), [("---\nlicense: mit\n---\n", "mit"), ("# a model\n", "unknown"), (None, "unknown")]
)
def test_the_licence_is_that_of_the_bases_own_card(tmp_path, card, licence):
    if card is not None:
        (tmp_path / "README.md").write_text(card)
    assert find_licence(str(tmp_path)) == licence


def test_the_use_of_several_adapters_loads_each():
    text = adapter_use("owner/name", "CAUSAL_LM", ["adapter0", "adapter1"])
    assert '"FOLDER/adapter0", adapter_name="adapter0")' in text
    assert 'model.load_adapter("FOLDER/adapter1", adapter_name="adapter1")' in text


def test_a_run_leaves_its_card_without_rows_clients_and_paths(tmp_path):
    base = make_model(tmp_path / "base")
    assert fedlight("fit", *tiny_selector(base, tmp_path / "run")).code == 0
    text = (tmp_path / "run" / "adapter" / "README.md").read_text()
    assert "| federated algorithm | FedAvg (https://arxiv.org/abs/1602.05629) |" in text
    assert re.search(r"^\| data \| toy:votes\S+; 6 clients, \d+ training examples \|$", text, re.MULTILINE)
    assert "| rounds | 2 |" in text
    assert "| command | `fedlight fit --config selector.yaml ...` |" in text
    assert "| val/accuracy |" in text
    assert "| sent by clients in visits |" in text
    assert str(tmp_path) not in text
    assert not re.search(r"(?<![\w:/])/\w", text)  # no path from the root
    assert not re.search(r"\bc00\d\b", text)  # nor a client
    assert "[More Information Needed]" not in text
