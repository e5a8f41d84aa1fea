import itertools
import shutil

import pytest
import yaml
from chat_stub import ChatStub, say
from tiny_world import fedlight, read_lines, refused, write_rows

KEY = "sk-secret-123"
PEOPLE = ("anna paints walls .", "ben bakes bread .", "finn reads letters .", "gina builds sheds .")
ROWS = [
    {"instruction": " ".join(pair), "output": pair[number % 2]}
    for number, pair in enumerate(itertools.permutations(PEOPLE, 2))
]


def arguments(tmp_path, model, run, generator):
    tries = {"number": 2, "generator": generator, "max_rouge_l": 1.0, "folder": str(tmp_path / "tries")}
    data = {
        "source": write_rows(tmp_path / "rows.jsonl", ROWS),
        "columns": {"instruction": "instruction", "response": "output"},
        "template": "POST : {instruction} CHOICE :",
        **{"tokenizer": model, "max_tokens": 64, "split": {"val_share": 0.0}, "batch_size": 2},
        "partition": {"by": "iid", "num_clients": 3},
        "augmentation": {"class_path": "SelfInstruct", "init_args": tries},
    }
    trainer = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "max_epochs": 1}
    config = {
        "model": {"class_path": "SFTModule", "init_args": {"model": model, "lora": {"rank": 2}}},
        "data": {"class_path": "AugmentedInstructionDataModule", "init_args": data},
        "trainer": {**trainer, "limit_val_batches": 0},
        "federated": {"class_path": "FederatedLoop", "init_args": {"clients_per_round": 2, "local_steps": 1}},
    }
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    return ["fit", f"--config={file}", f"--trainer.default_root_dir={tmp_path / run}"]


def added(tmp_path, run):
    return read_lines(tmp_path / run / "augmentation/added.jsonl")


def answer(body, number):
    prompt = body["messages"][-1]["content"]
    if prompt.startswith("Example 1:"):
        return say("Response: ben bakes bread .")
    return say(f"Instruction 3: anna reads {prompt.split()[-14]} {number} .")


@pytest.fixture
def endpoint(tmp_path, monkeypatch):
    monkeypatch.setenv("THE_KEY", KEY)
    with ChatStub(answer) as stub:
        init_args = {"base_url": stub.base_url, "model": "m", "api_key_variable": "THE_KEY"}
        init_args |= {"cache": str(tmp_path / "answers")}
        yield stub, {"class_path": "ChatEndpoint", "init_args": init_args}


def test_an_endpoint_from_yaml_makes_training_rows_and_its_key_is_nowhere(endpoint, tmp_path, tiny_model):
    stub, generator = endpoint
    outcome = fedlight(*arguments(tmp_path, tiny_model, "run", generator))
    assert outcome.code == 0, outcome.err
    rows = added(tmp_path, "run")
    assert [row["client"] for row in rows] == ["c0", "c0", "c1", "c1", "c2", "c2"]
    assert all(row["fields"]["instruction"].startswith("anna reads") for row in rows)
    assert {row["fields"]["response"] for row in rows} == {"ben bakes bread ."}
    assert {row["row"] for row in rows} == {None}
    assert len(stub.bodies) == 12
    assert all(headers["Authorization"] == f"Bearer {KEY}" for headers in stub.headers)
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) > 15
    assert not any(KEY.encode() in path.read_bytes() for path in written)
    assert KEY not in outcome.out + outcome.err


def test_later_runs_ask_nothing_wherever_they_write_and_go_on_from_tries(endpoint, tmp_path, tiny_model):
    stub, generator = endpoint
    for run in ("run", "run", "other"):
        assert fedlight(*arguments(tmp_path, tiny_model, run, generator)).code == 0
    before = added(tmp_path, "run")
    assert before == added(tmp_path, "other")
    (tmp_path / "run/augmentation/settings.json").unlink()  # as if it had not come so far
    shutil.rmtree(tmp_path / "answers")
    assert fedlight(*arguments(tmp_path, tiny_model, "run", generator)).code == 0
    assert len(stub.bodies) == 12
    assert added(tmp_path, "run") == before


def test_a_missing_key_is_one_line(endpoint, tmp_path, tiny_model, monkeypatch):
    monkeypatch.delenv("THE_KEY")
    stub, generator = endpoint
    line = refused(fedlight(*arguments(tmp_path, tiny_model, "run", generator)))
    assert "the environment variable THE_KEY is not set" in line
    assert not stub.bodies


def test_a_local_model_from_yaml(tmp_path, tiny_model):
    init_args = {"model": tiny_model, "sampling": {"max_new_tokens": 6, "temperature": 1.0}, "keep_cut": True}
    generator = {"class_path": "LocalGenerator", "init_args": init_args}
    outcome = fedlight(*arguments(tmp_path, tiny_model, "run", generator))
    assert outcome.code == 0, outcome.err
    rows = added(tmp_path, "run")
    assert len(rows) == 6
    assert all(1 <= len(row["fields"]["instruction"].split()) <= 6 for row in rows)
