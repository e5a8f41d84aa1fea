import json

import pytest
from tiny_world import fedlight, read_lines, refused, table, write_rows

DOMAINS = ("codealpaca", "medalpaca", "fingpt", "mathinstruct")
NO_CALLBACKS = "--trainer.callbacks=[]"  # nobody asks the model all the questions of the test set
INSTRUCTIONS = "toy:instructions?num_clients=4&client_rows=10&topic_rows=1&chatter=5&split="


def ran(*arguments):
    outcome = fedlight(*arguments)
    assert outcome.code == 0, outcome.err
    return outcome


def short(folder, model):
    return [
        *("--trainer.accelerator=cpu", "--trainer.max_epochs=1", f"--trainer.default_root_dir={folder}"),
        *("--federated.local_steps=1", "--federated.clients_per_round=1", f"--model.model={model}"),
        "--data.batch_size=4",
    ]


def toy(folder, model):
    sources = [f"--data.source={INSTRUCTIONS}private", f"--data.public_source={INSTRUCTIONS}public"]
    return [*short(folder, model), *sources, "--data.augmentation.number=7"]


def added(folder):
    by_client = {}
    for line in read_lines(folder / "augmentation/added.jsonl"):
        by_client.setdefault(line["client"], []).append(line)
    return by_client


def test_feddca_as_it_is(tiny_model, tmp_path):
    ran("fit", "--config=feddca.yaml", *toy(tmp_path, tiny_model))
    found = added(tmp_path)
    assert {client: len(rows) for client, rows in found.items()} == dict.fromkeys(("c0", "c1", "c2", "c3"), 7)
    domains = [row["fields"]["category"] for rows in found.values() for row in rows]
    assert domains.count("kitchen") > 14  # of 28; a fifth of the public rows are of the kitchen
    assert len(table(tmp_path / "visits.csv")) == 1
    (scores,) = (tmp_path / "tasks").glob("*/scores.json")
    assert "score/kitchen" in json.loads(scores.read_text())
    ran("export", str(tmp_path), f"--output={tmp_path / 'out'}")
    for folder in ("adapter", "out"):
        card = (tmp_path / folder / "README.md").read_text()
        assert "; 4 clients, 68 training examples, 28 of them added to the clients' own |" in card


@pytest.mark.parametrize("name", ["RandomSampling", "DirectRetrieval"])
def test_another_augmentation_by_its_short_name(name, tiny_model, tmp_path):
    chosen = [f"--data.augmentation={name}", "--data.augmentation.number=5"]
    if name == "DirectRetrieval":
        chosen.append("--data.augmentation.encoder=HashedEncoder")
    ran("fit", "--config=feddca.yaml", *toy(tmp_path, tiny_model), *chosen, NO_CALLBACKS)
    assert [len(rows) for rows in added(tmp_path).values()] == [5] * 4


@pytest.mark.slow  # whole runs
def test_feddca_star_after_the_projector(tiny_model, tmp_path):
    star = ["fit", "--config=feddca_star.yaml", *toy(tmp_path / "star", tiny_model)]
    nothing = fedlight(*star, f"--data.augmentation.projector={tmp_path / 'none.ckpt'}")
    assert "no such file. Make one with" in refused(nothing)
    ran(
        *("fit", "--config=projector.yaml", f"--trainer.default_root_dir={tmp_path / 'projector'}"),
        *("--trainer.accelerator=cpu", "--trainer.max_epochs=1", "--trainer.log_every_n_steps=1"),
        *(f"--data.source={INSTRUCTIONS}public", "--data.columns={instruction: instruction, input: input}"),
    )
    checkpoint = tmp_path / "projector/checkpoints/epoch=0.ckpt"
    ran(*star, NO_CALLBACKS, f"--data.augmentation.projector={checkpoint}")
    assert [len(rows) for rows in added(tmp_path / "star").values()] == [7] * 4
    notes = json.loads((tmp_path / "star/augmentation/settings.json").read_text())["notes"]["clients"]
    assert notes["c0"]["sent_bytes"] == len(notes["c0"]["sizes"]) * (96 * 4 + 8)


@pytest.mark.usefixtures("any_text")
@pytest.mark.parametrize("domain", [None, *DOMAINS])
def test_the_setting_of_the_paper(domain, tiny_model, tmp_path):
    """Files of the same columns stand in for the sets of the hub; without a model of the hub, words are hashed."""
    files = {name: write_rows(tmp_path / f"{name}.jsonl", rows_of(name, 30)) for name in (*DOMAINS, "alpaca")}
    own = domain or "mathinstruct"
    others = json.dumps([file for name, file in files.items() if name != own])
    arguments = ["--config=feddca_llama3.yaml"] + [f"--data=data/{domain}_instructions.yaml"] * bool(domain)
    ran(
        *("fit", *arguments, *short(tmp_path / "run", tiny_model), "--model.lora.targets=all-linear"),
        *(f"--data.source={files[own]}", f"--data.public_source={others}", "--data.private_rows=20"),
        *("--data.augmentation.encoder=HashedEncoder", "--data.augmentation.number=9"),
        *("--data.augmentation.alpha=0.99", "--data.max_tokens=220"),
    )
    found = added(tmp_path / "run")
    assert [len(rows) for rows in found.values()] == [9] * 10
    assert {row["source"] for rows in found.values() for row in rows} <= set(files.values())
    assert len(read_lines(tmp_path / "run/augmentation/private.jsonl")) == 20


def rows_of(name, count):
    """With the columns of the set."""
    rows = [{"instruction": f"{name} post {i}", "input": "", "output": f"a {i}"} for i in range(count)]
    if name == "mathinstruct":
        return [{"source": "x", "output": row["output"], "instruction": row["instruction"]} for row in rows]
    if name == "medalpaca":
        return [{**row, "instruction": "Answer this", "input": f"{name} {i}"} for i, row in enumerate(rows)]
    return rows
