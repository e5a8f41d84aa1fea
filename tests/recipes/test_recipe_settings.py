"""What the recipes of the paper's experiments set, down to the parsed settings of their stages, is what the paper used.

Wu et al., "Towards Federated RLHF with Aggregated Client Preference for LLMs", ICLR 2025,
https://arxiv.org/abs/2407.03038: tables 3 (TL;DR), 4 (SHP) and 5 (data), appendix B.1 and B.2. The commands' own parser
reads what a stage gives it, and then stops, so defaults of the configs count as well as what the recipes say.
"""

import functools
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from recipe_runs import stages_of
from tiny_world import write_rows

from fedlight import conf
from fedlight.lightning_cli.cli import FedlightCLI

PROMPTS = "vwxyzjn/summarize_from_feedback_tldr_3_filtered"
TABLES = {
    "tldr": {"clients_per_round": 5, "regroup_every": 50, "max_new_tokens": 80, "max_tokens": 1024},
    "shp": {"clients_per_round": 10, "regroup_every": 100, "max_new_tokens": 300, "max_tokens": 512},
}
DATA = {
    "tldr": {
        "votes": "openai/summarize_from_feedback:comparisons",
        "partition": {"by": "client", "min_size": 1},  # 53 workers, the smallest with 1 vote
        "prompts": (PROMPTS, 42782),
        "evaluation": (PROMPTS, "test"),
    },
    "shp": {
        "votes": "stanfordnlp/SHP",
        "partition": {"by": "dirichlet", "num_clients": 200, "alpha": 0.3, "min_size": 1},
        "prompts": ("PKU-Alignment/PKU-SafeRLHF", 44578),
        "evaluation": ("stanfordnlp/SHP", "test"),
    },
}


def parsed(stage):
    """Settings of a stage as its command's parser gives them: a namespace of trainer, model, data and federated."""
    seen = []

    class Parsed(FedlightCLI):
        trainer = SimpleNamespace(callback_metrics={})

        def instantiate_classes(self):
            seen.append(self.config[self.command])

        def _run_subcommand(self, subcommand):
            pass

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedlight.lightning_cli.cli.lightning_cli", Parsed)
        stage.run()
    return seen[0]


@pytest.fixture(scope="module", params=TABLES)
def recipe(request, tmp_path_factory):
    """Name of a recipe, and a function from the name of its stage to the stage's settings."""
    stages = stages_of(request.param, tmp_path_factory.mktemp(request.param))
    return request.param, functools.cache(lambda name: parsed(stages[name]))


@pytest.mark.parametrize("stage", ["selector", "fedbiscuit", "reward", "feddpo", "fedavg"])
def test_selectors_and_baselines_are_trained_as_in_tables_3_and_4(recipe, stage):
    name, settings = recipe
    found = settings(stage)
    loop = found.federated.init_args
    assert (loop.clients_per_round, loop.local_steps) == (TABLES[name]["clients_per_round"], 30)
    assert (found.trainer.max_epochs, found.data.init_args.batch_size) == (500, 32)
    if stage in ("selector", "fedbiscuit"):
        model = found.model.init_args
        assert (model.optimizer.name, tuple(model.optimizer.args["betas"])) == ("AdamW", (0.9, 0.95))
        assert (model.lr, model.optimizer.schedule) == (1e-5, "constant")
        assert found.data.init_args.max_tokens == TABLES[name]["max_tokens"]


def test_fedbiscuit_as_in_appendix_b2(recipe):
    name, settings = recipe
    assert settings("selector").model.init_args.num_adapters == 1
    assert settings("selector").federated.init_args.algorithm.init_args.weighting == "unbiased"  # eq. 8
    found = settings("fedbiscuit")
    assert found.model.init_args.num_adapters == 3
    algorithm = found.federated.init_args.algorithm
    assert algorithm.class_path.endswith("FedBiscuit")
    assert algorithm.init_args.assignment.class_path.endswith("GreedyGroups")
    assert algorithm.init_args.weighting == "paper"
    assert algorithm.init_args.warmup_rounds == 50
    assert algorithm.init_args.regroup_every == TABLES[name]["regroup_every"]


def test_dpo_as_in_tables_3_and_4(recipe):
    found = recipe[1]("dpo")
    assert found.trainer.max_epochs == 5
    assert found.data.init_args.batch_size == 32
    model = found.model.init_args
    assert (model.optimizer.name, model.lr, model.beta) == ("RMSprop", 1e-6, 0.1)


@pytest.mark.parametrize("stage", ["selector", "fedbiscuit", "dpo", "reward", "feddpo", "fedavg"])
def test_lora_as_in_appendix_b1(recipe, stage):
    model = recipe[1](stage).model.init_args
    assert (model.lora.rank, model.lora.alpha, model.lora.dropout) == (8, 16, 0.05)


def test_generation_as_in_appendix_b1(recipe):
    name, settings = recipe
    several, one = (settings(stage).model.init_args.completions for stage in ("completions", "answers_raw"))
    assert (several.number, several.temperature) == (4, 0.7)
    assert (one.number, one.temperature) == (1, 0.0)
    assert several.max_new_tokens == one.max_new_tokens == TABLES[name]["max_new_tokens"]


def test_the_data_of_table_5(recipe):
    name, settings = recipe
    data = DATA[name]
    votes = settings("selector").data.init_args
    assert (votes.source, votes.split.train_split) == (data["votes"], "train")
    given = vars(votes.partition)
    assert {key: given[key] for key in data["partition"]} == data["partition"]
    prompts, evaluation = (settings(stage).data.init_args for stage in ("completions", "answers_raw"))
    assert (prompts.source, prompts.limit) == data["prompts"]
    assert (evaluation.source, evaluation.split) == data["evaluation"]
    if name == "shp":
        assert votes.format.trim is None  # a question of more than 512 tokens leaves its pairs out


def test_the_questions_of_shp_are_4293():
    settings = OmegaConf.load(conf.path("data/shp_prompts.yaml")).init_args
    assert (settings.source, settings.split, settings.limit) == ("stanfordnlp/SHP", "test", 4293)


@pytest.mark.parametrize(("limit", "too_long"), [("", 0), ("pair_tokens=150", 3)])
def test_pairs_of_two_answers_at_the_limit_are_labelled(limit, too_long, tiny_model, tmp_path, any_text):
    """Two prompts of 120 words, the limit, one with answers of 50 words, the limit as well, and one with short answers."""
    from fedlight.modules.selector import SelectorModule

    changes = [f"model={tiny_model}", "accelerator=cpu", "max_tokens=120", "max_new_tokens=50"]
    changes += limit.split()
    by_name = stages_of("fedbiscuit_table2", tmp_path / "run", *changes)
    selector = SelectorModule(tiny_model)
    selector.configure_model()
    selector.save_adapter(tmp_path / "run/selector/adapter")
    said = [" ".join([word] * 50) for word in ("anna", "ben", "leo")]
    rows = [
        {"fields": {"instruction": "walls " * 120}, "completions": said},
        {"fields": {"instruction": "birds " * 120}, "completions": ["anna", "ben"]},
    ]
    by_name["completions"].folder.mkdir()
    write_rows(by_name["completions"].folder / "completions.jsonl", rows)
    by_name["votes"].run()
    metrics = by_name["label"].run()["result"]["metrics"]
    assert metrics == {"label/pairs": 4 - too_long, "label/too_long": too_long}
    table = by_name["table"].arguments
    assert table["labels"]["FedBis"] == str(by_name["label"].folder)


@pytest.mark.parametrize("name", ["fedbiscuit_table1", "fedbiscuit_table2"])
def test_steps_of_the_tables_have_32_texts_in_parts_of_two(name, tmp_path):
    stages = stages_of(name, tmp_path)
    for stage in ("sft", "selector", "dpo", "fedbiscuit5_dpo", "reward", "feddpo", "fedavg"):
        settings = stages[stage].config()
        parts = settings["data"]["init_args"]["batch_size"], settings["trainer"]["accumulate_grad_batches"]
        assert parts == (2, 16), stage


REDDIT = ("stanfordnlp/SHP", "test", 4293)
VARIANTS = {  # of table 2: the prompts, how many, completions, whether prompts of held-out votes are left out
    "saferlhf": ("PKU-Alignment/PKU-SafeRLHF", "train", 44578, 4, True),
    "reddit_2": (*REDDIT, 2, False),
    "reddit_4": (*REDDIT, 4, False),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_blocks_of_table_2_are_variants(variant, tmp_path):
    stages = stages_of("fedbiscuit_table2", tmp_path, f"variant={variant}")
    settings = stages["completions"].config()
    data = settings["data"]["init_args"]
    completions = settings["model"]["init_args"]["completions"]["number"]
    found = data["source"], data["split"], data["limit"], completions, data["exclude"]["held_out"] is not None
    assert found == VARIANTS[variant]
    held_out = stages["dpo"].config()["trainer"]["callbacks"][1]["init_args"]["prompts"]["init_args"]
    assert (held_out["source"], held_out["split"]) == ("PKU-Alignment/PKU-SafeRLHF", "test")
    assert (stages["answers_raw"].config()["data"]["init_args"]["split"], data["split"]) != ("test", "test")


def test_a_block_that_table_2_does_not_have_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"does not have: Interpolation key 'variants\.shp\.prompts'"):
        stages_of("fedbiscuit_table2", tmp_path, "variant=shp")


@pytest.mark.parametrize("stage", ["dpo", "fedbiscuit_dpo", "fedbiscuit5_dpo"])
def test_the_tables_go_on_with_the_best_of_five_epochs(stage, tmp_path):
    for name in ("fedbiscuit_table1", "fedbiscuit_table2"):
        trainer = parsed(stages_of(name, tmp_path / name)[stage]).trainer
        assert trainer.max_epochs == 5
        _, score, export, keep = (callback.init_args for callback in trainer.callbacks)
        assert list(score.judges) == ["held_out"]
        assert export.monitor == keep.monitor == "win_rate/held_out"
        assert (keep.mode, keep.save_top_k) == ("max", -1)
        assert export.folder == str(tmp_path / name / stage / "adapter")
