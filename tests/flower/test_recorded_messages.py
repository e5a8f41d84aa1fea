import re

import pytest
import torch
from nodes_here import ALL_KINDS, Here, MadeParts, deploy, two_nodes, visits_of
from plain_lightning import assert_equal, weights
from safetensors.torch import load
from tiny_world import VOTES, table, tiny_selector

from fedlight.datamodules.rows.rows import load_rows
from fedlight.flower.messages import Parcel, write_header
from fedlight.flower.node import Node
from fedlight.flower.server import serve
from fedlight.lightning_cli.cli import lightning_cli

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning, about rounds of a few batches

OF_EVERY = {"format", "action", "run", "nonce"}
OF_ROUND = {"round", "num_rounds", "shares", "memories"}
DOWN = {
    "join": OF_EVERY | {"num_rounds", "sizes", "groups"},
    "prepare": OF_EVERY | OF_ROUND | {"model"},
    "losses": OF_EVERY | OF_ROUND | {"model", "losses_on", "adapters", "by_example"},
    "visit": OF_EVERY | OF_ROUND | {"visits", "model", "rates", "algorithm"},
}
UP = {
    "join": OF_EVERY | {"clients", "groups", "base", "key", "signature", "fedlight", "torch", "lightning"},
    "prepare": OF_EVERY | {"round", "made"},
    "losses": OF_EVERY | {"round", "losses"},
    "visit": OF_EVERY | {"round", "visits", "lost"},
}
OF_VISIT_DOWN = {"client", "label", "payload"}
OF_VISIT_UP = OF_VISIT_DOWN | {"diverged", "names", "steps", "seconds", "loss", "training"}


def record(name, folder):
    there = Here(two_nodes(name, folder))
    _, loop = deploy(name, folder / "server", there)
    return there.messages, loop


@pytest.mark.parametrize(
    "name", ["fedavg", "scaffold", "fedbiscuit", "soft", "fewfedpit", "fedrep", "product_average", "wire"]
)
def test_headers_have_the_documented_fields_alone_and_name_a_nodes_own_clients(tmp_path, name):
    messages, loop = record(name, tmp_path)
    home = loop.nodes._home
    for one in messages:
        words = set(re.findall(r'"([^"]*)"', write_header(one.asked.header).decode()))
        assert {home[client] for client in words & home.keys()} <= {one.node}
        action = one.asked.header["action"]
        assert set(one.asked.header) == DOWN[action]
        assert set(one.answer.header) == UP[action]
        for visit in one.asked.header.get("visits", ()):
            assert set(visit) == OF_VISIT_DOWN
        for visit in one.answer.header.get("visits", ()):
            assert set(visit) == OF_VISIT_UP


@pytest.mark.parametrize("name", ["fedavg", "fedrep", "fedsa_lora", "local_only", "fewfedpit"])
def test_payloads_hold_the_due_tensors_alone(tmp_path, name):
    messages, loop = record(name, tmp_path)
    parts = MadeParts([f"--kind={name}", "--trainer.default_root_dir=."], lambda one: True)
    names = {n for n, p in parts.model.named_parameters() if p.requires_grad}
    private = [n for n in names if hasattr(loop.algorithm, "is_private") and loop.algorithm.is_private(n)]
    private += [n for n in names if name == "fedsa_lora" and "lora_B" in n]
    private += names if name == "local_only" else []
    seen = set()
    for one in messages:
        for data in one.answer.payloads.values():
            tensors = load(data)
            seen |= tensors.keys()
            assert {value.dtype for value in tensors.values()} == {torch.float32}
    assert seen == names - {*private}


@pytest.mark.parametrize("name", ["uniform", "uniform_fewfedpit"])
def test_numbers_of_rows_stay_with_the_nodes_where_all_clients_count_alike(tmp_path, name):
    messages, loop = record(name, tmp_path)
    assert set(loop.nodes.sizes.values()) == {1}
    for one in messages:
        head = one.answer.header
        assert set(head.get("clients", {"": 1}).values()) == {1}
        assert set(head.get("made", {"": 1}).values()) <= {0, 1}
        for visit in head.get("visits", ()):
            assert visit["steps"] == ALL_KINDS[name](tmp_path).loop.get("local_steps", 2)
            assert {count for _, count in visit["training"].values()} <= {1}
    assert {row["examples"] for row in visits_of(tmp_path / "server")} == {"1"}


def test_a_server_that_asks_for_sizes_nonetheless_gets_none(tmp_path):
    [home, _] = two_nodes("uniform", tmp_path).values()
    ask = {
        "format": 1,
        "action": "join",
        "run": "r",
        "nonce": "0",
        "num_rounds": 3,
        "sizes": True,
        "groups": True,
    }
    assert set(home.answer(Parcel(ask)).header["clients"].values()) == {1}


@pytest.fixture(scope="module")
def selector(tiny_model, tmp_path_factory):
    """FedBis on the embedded world in the emulator and on two nodes, validated, with the messages of these."""
    folder = tmp_path_factory.mktemp("selector")
    more = "--trainer.callbacks+=fedlight.callbacks.logs.client_accuracy.ClientAccuracy"
    emulated = lightning_cli(["fit", *tiny_selector(tiny_model, folder / "emulated", more)])
    args = tiny_selector(tiny_model, folder / "server", more)
    there = Here({n: Node(args, {}, folder / f"node{n}", part=(n, 2)) for n in range(2)})
    trainer, loop = serve(args, there, wait_seconds=0)
    return emulated, trainer, loop, there, folder


def test_a_config_of_the_package_ends_with_the_same_bits(selector):
    emulated, trainer, _, _, folder = selector
    assert_equal(weights(trainer.lightning_module), weights(emulated.model))
    assert visits_of(folder / "server") == visits_of(folder / "emulated")
    server, alone = (table(folder / end / "clients.csv") for end in ("server", "emulated"))
    assert server == [row | {"group": ""} for row in alone]  # the server knows no groups
    found, expected = trainer.callback_metrics, emulated.trainer.callback_metrics
    for name in ("loss", "accuracy", "client_mean", "client_worst_tenth", "client_std"):
        assert float(found[f"val/{name}"]) == pytest.approx(float(expected[f"val/{name}"]), rel=1e-5)


@pytest.mark.slow
def test_candidates_are_made_on_the_nodes_and_stay_there(tiny_model, tmp_path):
    def args(folder):
        return [
            *("--config=fewfedpit.yaml", f"--trainer.default_root_dir={tmp_path / folder}"),
            *(f"--model.model={tiny_model}", "--model.adapter=null", "--model.merge_adapter=false"),
            "--data.source=toy:instructions?split=private&client_rows=6&num_clients=3&joined=1",
            *("--trainer.max_epochs=1", "--trainer.accelerator=cpu", "--data.synthesis.keep_cut=true"),
            *("--data.synthesis.number=3", "--data.keep=2", "--trainer.callbacks=[{class_path: VisitLog}]"),
            "--data.synthesis.prompts.instruction.pattern=(?P<instruction>.*)",
            "--data.synthesis.prompts.response.pattern=(?P<response>.*)",
        ]

    emulated = lightning_cli(["fit", *args("emulated")])
    # One node: prompts of its clients are answered together, and what is drawn depends on which share a batch.
    there = Here({0: Node(args("server"), {}, tmp_path / "node0")})
    trainer, _ = serve(args("server"), there, wait_seconds=0)
    assert_equal(weights(trainer.lightning_module), weights(emulated.model))
    rows = visits_of(tmp_path / "server")
    assert rows == visits_of(tmp_path / "emulated")
    assert {row["split"] for row in rows} == {"train", "synthetic"}
    assert not [*(tmp_path / "server").rglob("*.jsonl")]
    assert [*tmp_path.glob("node*/**/synthetic/*.jsonl")]


def test_no_text_and_no_token_of_a_row_reaches_the_server(selector):
    _, _, _, there, _ = selector
    rows = load_rows(VOTES)
    texts = {str(value) for row in rows for value in row.values() if isinstance(value, str)}
    lengthy = {text for text in texts if len(text) > 12}
    assert len(lengthy) > 20, VOTES
    for one in there.messages:
        sent = write_header(one.answer.header).decode() + "".join(one.answer.payloads)
        assert not [text for text in lengthy if text in sent]
        data = b"".join(one.answer.payloads.values())
        assert not [text for text in lengthy if text.encode() in data]
        for payload in one.answer.payloads.values():
            for name, value in load(payload).items():
                assert "lora" in name
                assert value.dtype == torch.float32
                # Token ids are whole numbers; trained weights are none.
                assert (value != value.round()).any()
