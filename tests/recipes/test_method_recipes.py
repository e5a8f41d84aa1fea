"""Recipes of every method, from votes to their table: the embedded world, rows with the columns of TL;DR and of SHP."""

import pytest
import torch
from omegaconf import OmegaConf
from real_rows import SAFERLHF, SHP, TLDR, TLDR_PROMPTS
from recipe_runs import is_drawn, ran, rows_of, stages_of
from safetensors.torch import load_file, save
from tiny_world import HELDOUT, VOTES, read_lines, table, tiny_recipe, write_rows

from fedlight import conf
from fedlight.recipes import recipe as recipes
from fedlight.support.files import result_of

MIB = 2**20
BY_FEDBISCUIT = ["FedBiscuit, U = 3", "FedBiscuit, U = 5"]
ONE_TASTE = ["FedBis, one taste", "FedBiscuit, one taste"]
SELECT = ["FedDPO", "reward model", "pooled votes", "FedBis", *BY_FEDBISCUIT, *ONE_TASTE]
ANSWER = ["FedAvg on chosen", "FedDPO", "reward model", "FedBis", *BY_FEDBISCUIT, "oracle's labels"]
RULES = ["longer wins, characters", "longer wins, words", "majority of the other voters"]
COLUMNS = {"accuracy", "clients", "worst_tenth", "own", "own_worst_tenth", "own_spread"}

pytestmark = pytest.mark.slow


def run(recipe, folder, *changes, seed=3):
    outcome = ran("run", recipe, f"--output={folder}", "--seeds", str(seed), *changes)
    return rows_of(folder), outcome


@pytest.fixture(scope="module")
def changes(tiny_model):
    return tiny_recipe(tiny_model, "warmup_rounds=1", "regroup_every=1", "rounds=6", "dpo_epochs=1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, changes):
    """Of a finished run of the recipe fedbiscuit."""
    folder = tmp_path_factory.mktemp("methods")
    alike = (f"alike_source={VOTES}", f"alike_test_source={HELDOUT}")
    run("fedbiscuit", folder, *changes, *alike, "warmup_rounds_of_5=1")
    return folder


@pytest.fixture(scope="module")
def rows(folder):
    return rows_of(folder)


def test_every_method_is_in_the_table_with_the_shares_that_are_measured_of_it(rows):
    assert list(rows) == ["raw", "FedAvg on chosen", *SELECT, "oracle's labels"]
    assert {row["seed"] for row in rows.values()} == {3}
    assert rows["raw"]["win_rate"] == rows["raw"]["win_rate_by_group"] == 0.5
    for method, row in rows.items():
        measured = set(row) - {"method", "seed", "win_rate", "win_rate_by_group", "sent_mib", "groups_ari"}
        assert measured >= (COLUMNS if method in ("raw", *SELECT) else set()), method
        assert ("win_rate" in row) == ("win_rate_by_group" in row) == (method in ("raw", *ANSWER))
        assert ("groups_ari" in row) == method.startswith("FedBiscuit")
        assert ("sent_mib" in row) == (method not in ("raw", "oracle's labels"))
    for row in rows.values():
        others = {"method", "seed", "sent_mib", "groups_ari", "labelled", "too_long"}
        values = {name: row[name] for name in row if name not in others}
        assert all(0 <= value <= 1 for value in values.values()), row
        assert row.get("worst_tenth", 0) <= row.get("clients", 1)
        assert row.get("own_worst_tenth", 0) <= row.get("own", 1)
        assert -1 <= row.get("groups_ari", 0) <= 1
        assert row.get("win_rate", 0) in [halves / 12 for halves in range(13)]  # 6 prompts


def test_the_pairs_that_dpo_learns_from_are_counted(rows):
    """Six prompts with two completions each; equal ones make no pair."""
    labelling = {method for method, row in rows.items() if "labelled" in row}
    assert labelling == {"reward model", "FedBis", *BY_FEDBISCUIT}
    for method in labelling:
        assert 0 < rows[method]["labelled"] <= 6, method
        assert rows[method]["too_long"] == 0, method


def test_a_client_uses_its_groups_selector(rows, folder):
    """Not the vote of all; elsewhere there is one model, and it is everybody's own."""
    for method in ("raw", "FedBis", "FedDPO", "reward model", "pooled votes"):
        assert rows[method]["own"] == rows[method]["clients"]
    for method, stage in zip(BY_FEDBISCUIT, ("fedbiscuit", "fedbiscuit5"), strict=True):
        of_test = [row for row in table(folder / f"seed3/{stage}_test/clients.csv") if row["stage"] == "test"]
        assert len(of_test) == 6
        # Later groupings replace earlier ones.
        last = {row["client"]: row["selector"] for row in table(folder / f"seed3/{stage}/groups.csv")}
        assert {row["client"]: row["selector"] for row in of_test} == last
        for column, own in (("accuracy", "clients"), ("own_accuracy", "own")):
            assert sum(float(row[column]) for row in of_test) / 6 == pytest.approx(rows[method][own])


@pytest.mark.parametrize(
    ("method", "stage", "selectors", "groupings"),
    [("FedBiscuit, U = 3", "fedbiscuit", 3, 3), ("FedBiscuit, U = 5", "fedbiscuit5", 5, 1)],
)
def test_fedbiscuit_sends_its_visits_and_its_groupings(rows, folder, method, stage, selectors, groupings):
    """Six rounds, U of them warm-up, a grouping in each of the others; sizes from what a checkpoint holds."""
    run_folder = folder / f"seed3/{stage}"
    checkpoint = max((run_folder / "checkpoints").glob("*.ckpt"))
    everything = torch.load(checkpoint, weights_only=True)["state_dict"]
    one = {name: value for name, value in everything.items() if ".adapter0." in name}
    assert len(everything) == selectors * len(one) > 0
    visits = table(run_folder / "visits.csv")
    assert len(visits) == 6 * 2
    assert {int(row[f"bytes_{way}"]) for row in visits for way in ("down", "up")} == {len(save(one))}
    grouped = table(run_folder / "groups.csv")  # one row for each client and grouping
    assert len(grouped) == 6 * groupings
    answer = save({"losses": torch.zeros(selectors)})
    sent = len(visits) * 2 * len(save(one)) + len(grouped) * (len(save(everything)) + len(answer))
    assert rows[method]["sent_mib"] == sent / MIB


def test_what_the_others_send_in_the_same_visits(rows, folder):
    for method, stage in (("FedBis", "selector"), ("FedDPO", "feddpo"), ("FedAvg on chosen", "fedavg")):
        visits = table(folder / f"seed3/{stage}/visits.csv")
        sent = sum(int(row["bytes_down"]) + int(row["bytes_up"]) for row in visits)
        assert (len(visits), rows[method]["sent_mib"]) == (12, sent / MIB)
    assert rows["pooled votes"]["sent_mib"] == 0
    # A reward model has a head besides.
    assert rows["reward model"]["sent_mib"] > rows["FedBis"]["sent_mib"]
    """The same clients in the same rounds, for the same steps."""
    stages = ("selector", "fedbiscuit", "fedbiscuit5", "reward", "feddpo", "fedavg")
    visits = [
        [(row["round"], row["client"], row["steps"]) for row in table(folder / f"seed3/{stage}/visits.csv")]
        for stage in stages
    ]
    assert all(own == visits[0] for own in visits[1:])


def test_reward_hacking_goes_on_from_there(folder, tiny_model, tmp_path):
    few = (f"model={tiny_model}", "accelerator=cpu", "epochs=1", "num_eval_prompts=4")
    ran("run", "reward_hacking", f"--output={tmp_path}", "--seeds", "3", f"selectors={folder}", *few)
    assert is_drawn(tmp_path / "seed3/plot/reward_hacking.svg")
    for stage in ("one", "several"):
        (metrics,) = (tmp_path / f"seed3/{stage}").rglob("metrics.csv")
        for judge in ("oracle", "selector"):
            rates = [float(row[f"win_rate/{judge}"]) for row in table(metrics) if row[f"win_rate/{judge}"]]
            assert rates
            assert all(0 <= rate <= 1 for rate in rates)


def test_tldr(tiny_model, tmp_path, any_text):
    asked = [{**row, "post": f"another {row['post']}"} for row in TLDR_PROMPTS]
    files = {"v.jsonl": TLDR, "p.jsonl": [*asked[:2], *TLDR_PROMPTS], "e.jsonl": asked}
    votes, prompts, evaluation = (write_rows(tmp_path / name, rows) for name, rows in files.items())
    rows, _ = run(
        "tldr",
        tmp_path / "out",
        *tiny_recipe(tiny_model, "rounds=4", "warmup_rounds=1", "regroup_every=1", "local_steps=1"),
        *(f"train_source={votes}", f"test_source={votes}", f"prompt_source={prompts}", "max_tokens=200"),
        *(
            f"eval_source={evaluation}",
            "num_prompts=4",
            "num_eval_prompts=4",
            "dpo_epochs=1",
            "val_share=0.3",
        ),
    )
    asked = read_lines(tmp_path / "out/seed3/completions/completions.jsonl")
    posts = [row["fields"]["post"] for row in asked]
    # Those of the evaluation, which come first, are left out.
    assert posts == [row["post"] for row in TLDR_PROMPTS[:4]]
    judged = ["raw", "FedAvg on chosen", "FedDPO", "reward model", "FedBis", "FedBiscuit"]
    assert [*rows] == [*RULES, *judged, "pooled votes"]
    assert rows["raw"]["win_rate"] == 0.5
    assert all(rows[method]["win_rate"] in [n / 8 for n in range(9)] for method in judged)  # of 4 prompts
    assert {name for name, row in rows.items() if "accuracy" not in row} <= {"FedAvg on chosen", RULES[2]}
    # "second N" against "first N" by the number of the post, 12 votes; each of its own worker.
    assert (rows[RULES[0]]["both_orders"], rows[RULES[1]]["both_orders"]) == (0.5, 0.5)
    assert (rows[RULES[0]]["votes"], rows[RULES[0]]["unjudged"]) == (12, 0)
    assert rows[RULES[2]] == {"method": RULES[2], "seed": 3, "votes": 0, "unjudged": 12}
    assert "groups_ari" not in rows["FedBiscuit"]  # nobody knows these workers' groups
    grouped = table(tmp_path / "out/seed3/fedbiscuit/groups.csv")
    assert {row["client"] for row in grouped} == {"w0", "w1", "w2"}


def test_votes_are_trained_on_and_tested_with_the_words_and_lengths_of_the_labels(tmp_path):
    changes = ("choice_template={post} A: {response_a} B: {response_b}", "max_tokens=300")
    found = stages_of("tldr", tmp_path, *changes, "generation_template={post} TL;DR:")
    by_asked = {
        "votes": ("choice_template", ["selector", "fedbiscuit", "pooled", "selector_test"]),
        "reward_votes": ("generation_template", ["reward", "reward_test", "feddpo", "fedavg"]),
    }
    for asked, (template, trained) in by_asked.items():
        wanted = found[asked].config()["data"]["init_args"]["format"][template]
        for settings in (found[name].config()["data"]["init_args"] for name in trained):
            assert (settings["format"][template], settings["max_tokens"]) == (wanted, 300)
    assert found["longer_words"].arguments["settings"]["max_tokens"] == 300


def test_shp_where_it_is_not_tldr(tiny_model, tmp_path, any_text):
    votes, prompts = write_rows(tmp_path / "v.jsonl", SHP), write_rows(tmp_path / "p.jsonl", SAFERLHF)
    comparisons = OmegaConf.load(conf.path("data/shp.yaml"))
    comparisons.init_args.partition.num_clients = 8  # there are 200 questions
    OmegaConf.save(comparisons, tmp_path / "shp.yaml")
    stages = stages_of(
        "shp",
        tmp_path / "out",
        *tiny_recipe(tiny_model, "rounds=1", "clients_per_round=1", "local_steps=1", "max_tokens=200"),
        *(f"train_source={votes}", f"test_source={votes}", f"prompt_source={prompts}"),
        *(f"eval_source={votes}", f"comparisons={tmp_path / 'shp.yaml'}"),
    )
    for name in ("selector", "reward", "completions", "answers_raw"):
        stages[name].run()
    for name in ("selector", "reward"):
        assert len(table(tmp_path / f"out/{name}/visits.csv")) == 1
    longer, others = (stages[name].run()["result"] for name in ("longer_characters", "other_voters"))
    assert longer["metrics"]["test/votes"] == others["metrics"]["test/votes_unjudged"] == 400
    unjudged = {"test/votes": 0, "test/votes_unjudged": 400}
    assert others == {"metrics": unjudged, "votes": 400, "comparisons": 400}
    assert "test/client_mean" not in longer["metrics"]  # a label of SHP is nobody's
    asked = [
        {row["fields"]["instruction"] for row in read_lines(tmp_path / f"out/{name}/completions.jsonl")}
        for name in ("completions", "answers_raw")
    ]
    assert asked[0] == {"how 0", "how 1", "how 2"}  # the prompts of SafeRLHF, each once
    assert len(asked[1]) == 6
    assert all(text.startswith("question ") for text in asked[1])  # those of SHP's test split


def test_one_shared_model_for_certain_and_uncertain_clients(tmp_path, changes):
    rows, outcome = run("fedbiscuit_loud", tmp_path, *changes, "tastes=loud")
    perfect = ["perfect selector of all votes", "majority of perfect selectors"]
    assert list(rows) == ["raw", *perfect, "FedBis", "FedBiscuit, U = 3"]
    for method, row in rows.items():
        by_group = [row[f"win_rate_{group}"] for group in ("thorough", "warm", "terse")]
        assert row["worst_group"] == min(by_group)
        assert min(by_group) <= row["win_rate_by_group"] <= max(by_group)
        ends = [row.get(f"win_rate_by_group_{end}") for end in ("low", "high")]
        assert (ends == [None, None]) == (method == "raw")  # against themselves raw answers tie
        assert method == "raw" or ends[0] <= row["win_rate_by_group"] <= ends[1]
    labelled = [tmp_path / f"seed3/label_by_{who}/preferences.jsonl" for who in ("oracle", "groups")]
    of_all, of_groups = (
        {(row["response_a"], row["response_b"]): row["choice"] for row in read_lines(file)}
        for file in labelled
    )
    assert any(of_all[pair] != of_groups[pair] for pair in of_all.keys() & of_groups.keys())
    assert "minus FedBis" in outcome.err
    without = recipes.load("fedbiscuit_loud", ["selectors=false"])
    (differences,) = recipes.stages_over_seeds(without, tmp_path, [3])
    assert differences.arguments["against"] == "perfect selector of all votes"


def test_table_1_goes_on_with_the_best_epoch_of_dpo(tmp_path, tiny_model):
    changes = tiny_recipe(tiny_model, f"policy_model={tiny_model}", "warmup_rounds=1", "regroup_every=1")
    few = ("dpo_epochs=4", "epoch_prompts=6", f"epoch_source={HELDOUT}")
    ran("run", "fedbiscuit_table1", "--twin", f"--output={tmp_path}", "--only", "dpo", *changes, *few)
    (metrics,) = (tmp_path / "seed0/dpo").rglob("metrics.csv")
    logged = [float(row["win_rate/held_out"]) for row in table(metrics) if row["win_rate/held_out"]]
    assert len(logged) == 5  # before training, and after each epoch
    best = max(range(4), key=lambda epoch: logged[1:][epoch])
    assert result_of(tmp_path / "seed0/dpo")["metrics"]["exported/epoch"] == best + 1
    kept = torch.load(tmp_path / f"seed0/dpo/checkpoints/epoch={best}.ckpt", weights_only=True)["state_dict"]
    exported = load_file(tmp_path / "seed0/dpo/adapter/adapter_model.safetensors")
    sums = [sorted(weight.sum().item() for weight in own.values()) for own in (kept, exported)]
    assert sums[0] == sums[1]
