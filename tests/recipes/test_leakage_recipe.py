import pytest
from recipe_runs import differing, is_drawn, ran, rows_of, stages_of
from tiny_world import read_lines, table
from trimmed import trimmed

TINY = (
    *("rounds=2", "clients_per_round=2", "local_steps=1", "batch_size=4", "lora_rank=2"),
    *("accelerator=cpu", "exercises=toy:writing?size=64&questions=0", "samples=4", "examples=4"),
    *("members=4", "random_secrets=3", "attack_every=2"),
    "public_source=toy:instructions?split=public&topic_rows=12&chatter=0",
    "test_source=toy:instructions?split=test&topic_rows=1",
)


def test_all_runs_are_the_same_but_for_the_public_rows(tmp_path):
    found = stages_of("feddca_leakage", tmp_path)
    assert "zero_shot" not in found  # of the model before it can write; `raw` takes its place
    assert "none_fedavg" not in found
    alone = found["none"].arguments
    assert alone["data.init_args.augmentation"] is None
    for number in (100, 200, 300, 400, 500):
        other = found[f"feddca_{number}"].arguments
        augmentation = "data.init_args.augmentation"
        assert differing(alone, other) == {
            augmentation,
            f"{augmentation}_folder",
            f"{augmentation}.init_args.number",
        }
        assert other[f"{augmentation}.init_args.number"] == number
    attacks = [one["class_path"] for one in alone["trainer.callbacks"]]
    assert attacks[-3:] == ["MemoryExtraction", "DiscoverableMemorization", "MembershipInference"]
    assert alone["federated.clients_per_round"] == 10  # full participation, as in the paper
    assert alone["trainer.max_epochs"] == 10


def test_the_attacked_client_can_be_chosen(tmp_path):
    found = stages_of("feddca_leakage", tmp_path, "attacked=null")["none"].arguments["trainer.callbacks"]
    (memory,) = [one for one in found if one["class_path"] == "MemoryExtraction"]
    assert memory["init_args"]["clients"] is None


@pytest.mark.slow
def test_feddca_leakage(tmp_path, tiny_model):
    recipe = trimmed("feddca_leakage", tmp_path, "feddca_200", "feddca_300", "feddca_400")
    ran("run", recipe, f"--output={tmp_path}", "--seeds", "3", *TINY, f"model={tiny_model}")
    rows = rows_of(tmp_path)
    assert [*rows] == ["pre-trained", "none", "FedDCA, 100", "FedDCA, 500"]
    for row in rows.values():
        assert 0 <= row["written, ROUGE-L"] <= row["written, best match"] <= 1
        assert 0 <= row["membership, AUC"] <= 1
    # Before training there is nothing that a loss could be compared with.
    assert rows["pre-trained"]["membership, AUC"] == 0.5
    measured = table(tmp_path / "seed3/none/attacks/attacks.csv")
    assert {row["round"] for row in measured} == {"0", "2"}
    for number in (100, 500):
        assert len(read_lines(tmp_path / f"seed3/augmentations/feddca_{number}/added.jsonl")) == 10 * number
    samples = read_lines(tmp_path / "seed3/none/attacks/round_2/memory_extraction.jsonl")
    assert len([one for one in samples if "text" in one]) == 4
    for figure in ("memory", "answers", "canaries", "membership"):
        assert is_drawn(tmp_path / f"seeds_3/{figure}/{figure}.svg")
