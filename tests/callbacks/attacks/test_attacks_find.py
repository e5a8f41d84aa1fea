from types import SimpleNamespace

import pytest
from attacked import fit, found, make_data, random_rows
from refusals import refusal
from tiny_world import read_lines

from fedlight import Lora, SFTModule
from fedlight.callbacks.attacks import DiscoverableMemorization, MembershipInference, MemoryExtraction
from fedlight.datamodules.rows import Canaries
from fedlight.datamodules.text import Template
from fedlight.evaluation.extraction import compare_with_all
from fedlight.evaluation.tasks.model import Likelihood

STEPS = 40


class WholeTexts(SFTModule):
    """Learns the instructions, too, as models do where the loss is not on the response alone."""

    def example_losses(self, batch):
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        return super().example_losses({**batch, "labels": labels})


def learn_by_heart(folder, *callbacks, kind=SFTModule, steps=STEPS):
    """One batch of all rows, again and again: the module and the data."""
    rows = random_rows(folder / "rows.jsonl", clients=2, rows=8)
    data = make_data(rows, val_share=0.4, batch_size=14, canaries=Canaries(repeats=2, length=3))
    module = kind("toy", lora=Lora(rank=16, alpha=32, dropout=0.0), lr=0.007, seed=1)
    fit("toy", folder, *callbacks, data=data, module=module, max_epochs=steps)
    return module, data


def lines(folder, name, number=STEPS):
    return read_lines(folder / f"attacks/round_{number}/{name}.jsonl")


@pytest.fixture(scope="module")
def by_heart(tmp_path_factory):
    """A run's folder, its module and its data."""
    folder = tmp_path_factory.mktemp("by_heart")
    settings = {"before_training": True, "every_n_rounds": 1000}
    return folder, *learn_by_heart(
        folder,
        DiscoverableMemorization(max_new_tokens=7, random_secrets=15, **settings),
        MembershipInference(**settings),
        MemoryExtraction(samples=20, max_new_tokens=14, **settings),
    )


@pytest.fixture
def folder(by_heart):
    return by_heart[0]


def before_and_after(folder, attack, steps=STEPS):
    metrics = {number: one for (number, _), one in found(folder).items()}
    assert list(metrics) == [0, steps]
    return (
        {name.split("/")[1]: value for name, value in one.items() if name.startswith(attack)}
        for one in metrics.values()
    )


def test_answers_known_by_heart(folder):
    before, after = before_and_after(folder, "discoverable_memorization")
    assert before["rouge_l"] < 0.1
    assert before["exact"] == before["canaries"] == 0
    assert before["exposure"] < 4
    assert after == {"rouge_l": 1, "exact": 1, "canaries": 1, "exposure": 4, "left_out": 0}
    records = lines(folder, "discoverable_memorization")
    assert [record["planted"] for record in records] == [False] * 10 + [True] * 2
    assert [record["client"] for record in records[10:]] == ["c0", "c1"]
    assert sorted(record["client"] for record in records[:2]) == ["c0", "c1"]  # in turn
    assert all(record["target"] == "global" for record in records)
    assert all(record["answer"].split() == record["response"].split() for record in records)
    assert records[-1]["exposure"] == 4
    assert len({record["prompt"] for record in records}) == 12


def test_members_known_by_their_losses(folder):
    before, after = before_and_after(folder, "membership_inference")
    for score in ("loss_", "min_k_"):
        assert before[f"{score}auc"] == pytest.approx(0.5, abs=0.3)  # 10 rows and 6: what chance may do
    assert before["tpr_at_0.1_fpr"] == 0
    for score in ("", "lira_"):  # nothing to compare with
        assert [before[score + rate] for rate in ("auc", "tpr_at_0.01_fpr")] == [0.5, 0]
    assert after.pop("left_out") == before["left_out"] == 0
    assert len(after) == 13
    assert set(after.values()) == {1}
    records = lines(folder, "membership_inference")
    assert [record["member"] for record in records] == [True] * 10 + [False] * 6
    assert {record["client"] for record in records[:10]} == {"c0", "c1"}
    assert {record["client"] for record in records[10:]} == {""}
    members, others = ({record["prompt"] for record in some} for some in (records[:10], records[10:]))
    assert len(members) == 10
    assert not members & others  # no text that they share tells them apart
    assert all(record["loss"] / record["reference"] == pytest.approx(record["ratio"]) for record in records)
    ratios = [record["ratio"] for record in records]
    assert max(ratios[:10]) < min(ratios[10:])
    at_first = lines(folder, "membership_inference", 0)
    assert [record["reference"] for record in at_first] == [record["reference"] for record in records]
    assert all(record["loss"] == record["reference"] for record in at_first)


def test_a_loss_on_responses_alone_gives_no_instructions_away(folder):
    before, after = before_and_after(folder, "memory_extraction")
    assert before["extracted"] == after["extracted"] == after["canaries"] == 0
    assert after["rouge_l_best"] < 0.5


def test_instructions_known_by_heart(tmp_path):
    attack = MemoryExtraction(samples=30, max_new_tokens=14, before_training=True, every_n_rounds=1000)
    learn_by_heart(tmp_path, attack, kind=WholeTexts, steps=60)
    before, after = before_and_after(tmp_path, "memory_extraction", 60)
    assert before["exact"] == before["extracted"] == before["canaries"] == 0
    assert before["rouge_l_best"] < 0.2
    assert after["exact"] > 0.3
    assert after["extracted"] > 0.3
    assert after["rouge_l_best"] > 0.7
    assert after["canaries"] == 1
    records = lines(tmp_path, "memory_extraction", 60)
    samples, canaries = records[:30], records[30:]
    assert all("CHOICE :" not in record["text"] for record in samples)
    assert len({record["text"] for record in samples}) > 5
    assert all((record["text"].split() == record["nearest"].split()) == record["exact"] for record in samples)
    assert [(record["client"], record["recovered"]) for record in canaries] == [("c0", True), ("c1", True)]
    assert all(
        any(canary["canary"] in " ".join(one["text"].split()) for one in samples) for canary in canaries
    )


def test_canaries_that_were_not_planted_are_not_recovered(by_heart):
    folder, module, data = by_heart
    own = lines(folder, "discoverable_memorization")
    rows = {
        client: [row for row in rows if row not in data.planted[client]]
        for client, rows in data.client_rows.items()
    }
    for seed in range(3):
        others = Canaries(length=3, seed=seed + 10).plant(data.client_rows)
        attack = DiscoverableMemorization(max_new_tokens=7, random_secrets=15)
        changed = {"client_rows": rows, "planted": others, "unseen_rows": None}
        attack.prepare(SimpleNamespace(**vars(data) | changed), module)
        metrics, records = attack.attack(module, None)
        assert metrics["exact"] == 1
        assert metrics["canaries"] == 0
        assert metrics["exposure"] < 4
        assert records[:10] == [{k: v for k, v in one.items() if k != "target"} for one in own[:10]]


class Knows:
    """Says no to everything; finds one secret likelier than all else."""

    def generate(self, prompts, *_, **__):
        return [["no"] for _ in prompts]

    def log_likelihoods(self, prompts, continuations):
        return [[Likelihood(-1.0 if " 7 7 7" in t else -9.0, 3, False) for t in own] for own in continuations]

    def fits(self, prompts, new_tokens):
        return [True] * len(prompts)


def prepared(clients, **settings):
    """An attack on clients with a row and a canary each, among four random secrets."""
    data = SimpleNamespace(
        client_rows={client: [{"instruction": f"of {client}", "response": "y"}] for client in clients},
        planted={client: [{"instruction": f"which {client}", "response": "7 7 7"}] for client in clients},
        template=Template("Q: {instruction}"),
        canaries=SimpleNamespace(secrets=lambda number: ["7 7 7", "1 2 3", "4 5 6", "8 8 8"]),
    )
    attack = DiscoverableMemorization(random_secrets=4, **settings)
    attack.prepare(data, Knows())
    return attack


def test_a_secret_that_is_drawn_again_is_no_rival_of_its_own():
    assert prepared(["a"]).attack(Knows(), None).metrics["exposure"] == 2  # the first of four


def test_of_an_upload_the_rows_and_canaries_of_its_client_alone_are_asked_for():
    attack = prepared(["a", "b"])
    assert [record["prompt"] for record in attack.attack(Knows(), "b").records] == ["Q: of b", "Q: which b"]
    everybody = {record["prompt"] for record in attack.attack(Knows(), None).records}
    assert everybody == {"Q: of a", "Q: of b", "Q: which a", "Q: which b"}


def test_instructions_of_some_clients_alone(tmp_path):
    everybody, one = (
        MemoryExtraction(samples=5, max_new_tokens=6, clients=clients, output=str(tmp_path / name), seed=3)
        for name, clients in (("everybody", None), ("one", ["c1"]))
    )
    data = make_data(random_rows(tmp_path / "rows.jsonl"))
    for attack in (everybody, one):
        fit("toy", tmp_path, attack, data=data, max_epochs=1)
    first, second = (
        read_lines(tmp_path / name / "round_1/memory_extraction.jsonl") for name in ("everybody", "one")
    )
    assert [record["text"] for record in first[:5]] == [record["text"] for record in second[:5]]
    assert [record.get("client") for record in first[5:]] == ["c0", "c1"]
    assert [record.get("client") for record in second[5:]] == ["c1"]
    known = [f"{row['instruction']} {row['input']}".strip() for row in data.client_rows["c1"]]
    texts = [record["text"] for record in second[:5]]
    expected, records = compare_with_all(texts, known)
    assert second[0]["mean"] == pytest.approx(records[0]["mean"])
    [row] = (tmp_path / "one/attacks.csv").read_text().splitlines()[1:]
    assert str(expected["rouge_l"]) in row.split(",")


def test_rows_can_be_chosen_by_their_prompt_and_canaries_are_asked_for_anyway():
    attack = prepared(["a", "b"], matching="of b$")
    asked = {record["prompt"] for record in attack.attack(Knows(), None).records}
    assert asked == {"Q: of b", "Q: which a", "Q: which b"}
    without = attack.attack(Knows(), "a")  # an upload whose client has no such row
    assert [record["prompt"] for record in without.records] == ["Q: which a"]
    assert "exact" not in without.metrics
    with refusal("no client has a row whose prompt has matching='of z' besides"):
        prepared(["a"], matching="of z")
    with refusal(r"matching='\(' is no regular expression: missing \)"):
        DiscoverableMemorization(matching="(")


def test_an_answer_with_a_wrong_number_has_no_identifier_though_its_rouge_l_is_high():
    attack = prepared(["a", "b", "c"])
    said = "Mara of a was born on 12 March 1987 and has record 48-2917"
    attack._rows["a"] = [{"instruction": "of a", "response": said}]
    attack._rows["c"] = [{"instruction": "record 77-1234", "response": "It is 77-1234"}]  # told by the prompt

    def asked(answer):
        model = Knows()
        model.generate = lambda prompts, *_, **__: [[answer] for _ in prompts]
        return attack.attack(model, None)

    wrong, half, right = (
        asked(answer) for answer in (said.replace("7", "8"), said.replace("48-2917", "48-29170"), said)
    )
    assert [found.metrics["identifiers"] for found in (wrong, half, right)] == [0, 0.5, 1]
    by_prompt = {record["prompt"]: record for record in wrong.records}
    assert by_prompt["Q: of a"]["rouge_l"] > 0.75
    assert "identifiers" not in by_prompt["Q: record 77-1234"]
    assert "identifiers" not in prepared(["a"]).attack(Knows(), None).metrics
