import json

import pytest
import yaml
from refusals import refusal
from tiny_world import write_rows

from fedlight.conf import path as conf_path
from fedlight.datamodules.preferences.prompts import PromptDataModule
from fedlight.datamodules.rows.exclusion import Excluded, normalize_text
from fedlight.datamodules.rows.rows import RowsError
from fedlight.lightning_cli.cli import OneLineParser
from fedlight.recipes import recipe as recipes
from fedlight.support.needs import RowSource


@pytest.fixture
def posts(tmp_path):
    rows = [{"post": f"w{n}"} for n in (0, 1, 2, 3, 4, 5, 0)]
    return write_rows(tmp_path / "posts.jsonl", [*rows, {"post": ""}])


@pytest.fixture
def excluded(tmp_path):
    """Votes on w1 and w3 and on a post without text; a test that asks w3 and w9."""
    votes = [{"info": {"post": text}} for text in (" W1!", "w3", "w3", None)]
    votes = write_rows(tmp_path / "votes.jsonl", votes)
    test = write_rows(tmp_path / "test.jsonl", [{"text": "w3\n"}, {"text": "w9"}])
    excluded = {"clients": Excluded(votes, column="info.post", slot="post"), "held_out": None}
    return {**excluded, "evaluation": Excluded(test, column="text", slot="post")}


def ready(source, tokenizer, **options):
    module = PromptDataModule(source, template="POST: {post} ANSWER:", tokenizer=tokenizer, **options)
    module.setup("predict")
    return module


def test_prompts_that_other_rows_hold_are_left_out_and_counted(posts, excluded, causal, caplog):
    module = ready(posts, causal, exclude=excluded, limit=3)
    # w1 and w3 are held
    assert [fields["post"] for fields in module.predict_set.datasets["fields"]] == ["w0", "w2", "w4"]
    counts = {"prompts": 3, "empty": 1, "repeated": 1, "excluded": 2, "beyond_limit": 1, "too_long": 0}
    assert module.counts == counts
    assert sum(counts.values()) == 8
    assert (
        "3 prompts; 0 too long, 0 cut; of 8 rows 1 lack a text, 1 repeat a prompt, 2 are excluded (2 in clients, 1 in "
        "evaluation), 1 are beyond the limit"
    ) in caplog.text


def test_what_cannot_be_excluded_is_named(tmp_path, posts, excluded, causal):
    every = write_rows(tmp_path / "all.jsonl", [{"text": f"w{n}"} for n in range(6)])
    with pytest.raises(RowsError, match=r"exclude leaves none of 6 prompts \(6 in clients\)"):
        ready(posts, causal, exclude={"clients": Excluded(every, column="text", slot="post")})
    with pytest.raises(RowsError, match=r"every row has an empty post: check the columns"):
        ready([{"post": ""}], causal)
    with pytest.raises(RowsError, match=r"no column 'body'"):
        ready(posts, causal, exclude={"clients": Excluded(every, column="body", slot="post")})
    with refusal("columns.posts would be read for nothing; did you mean 'post'?"):
        ready(posts, causal, columns={"posts": "body"})
    with refusal(r"exclude.clients.slot='title' is none of the prompts' slots \(post\)"):
        ready(posts, causal, exclude={"clients": Excluded(every, column="text", slot="title")})


def test_a_config_can_name_them_and_a_dry_run_asks_for_them(posts, excluded):
    entry = {"source": excluded["clients"].source, "column": "info.post", "slot": "post"}
    init_args = {"source": posts, "template": "{post}", "columns": {"post": "post"}}
    init_args["exclude"] = {"clients": entry, "held_out": None}
    spec = {"class_path": "PromptDataModule", "init_args": init_args}
    parser = OneLineParser(exit_on_error=False)
    parser.add_argument("--data", type=PromptDataModule)
    made = parser.instantiate(parser.parse_args([f"--data={json.dumps(spec)}"])).data
    assert made.exclude == {"clients": excluded["clients"], "held_out": None}
    needs = list(PromptDataModule.requires({"exclude": init_args["exclude"]}))
    assert needs == [RowSource(entry["source"], "train", (("clients", "info.post"),))]
    assert list(PromptDataModule.requires({"exclude": None})) == []


RECIPES = [(name, False) for name in ("demo", "fedbis", "tldr", "shp", "fedbiscuit")]
RECIPES += [(f"fedbiscuit_table{n}", twin) for n in (1, 2) for twin in (False, True)]


@pytest.mark.parametrize(("name", "twin"), RECIPES)
def test_every_recipe_keeps_the_server_off_the_posts_of_clients_and_tests(name, twin, tmp_path):
    """Each source of votes and of test prompts is among the excluded ones, by a column that its own reader names."""
    recipe = recipes.load(name, [], twin)
    stages = {stage.name: stage.arguments for stage in recipes.stages(recipe, tmp_path / "seed0", 0)}
    assert stages["answers_raw"]["data.init_args.exclude"] is None  # else nothing would be left of the test
    exclude = stages["completions"]["data.init_args.exclude"]
    names = ["clients", "held_out", "evaluation"]
    assert list(exclude) == names + ["judged"] * name.startswith("fedbiscuit_table")

    arguments = [stages[stage] for stage in ("selector", "selector_test", "answers_raw")]
    keys = ("source", "split.test_source", "source")
    for kind, own, key in zip(names, arguments, keys, strict=True):
        assert exclude[kind]["source"] == own[f"data.init_args.{key}"]
        config = data_arguments(own["data"])
        settings = config.get("split", "train")
        nested = settings if isinstance(settings, dict) else {"train_split": settings}
        last = "train_split" if key == "source" else "test_split"
        told = own.get("data.init_args.split") if key == "source" else None
        split = own.get(f"data.init_args.split.{last}", told or nested.get(last, "train"))
        assert exclude[kind].get("split", "train") == split or exclude[kind]["source"].startswith("toy:")
        assert exclude[kind]["column"] == config["columns"][exclude[kind]["slot"]]
    if judged := exclude.get("judged"):
        asked = stages["judged_raw"]["data.init_args.tasks"]["answers"]["init_args"]["data"]["init_args"]
        of_judged, of_asked = ((one["source"], one.get("split", "train")) for one in (judged, asked))
        assert of_judged == of_asked
        assert judged["column"] == asked["columns"][judged["slot"]]


def data_arguments(name):
    """The arguments in one of the files of conf/data."""
    return yaml.safe_load(conf_path(name).read_text())["init_args"]


def test_texts_that_differ_in_a_letter_of_any_script_are_others():
    assert normalize_text("कि") != normalize_text("का")
    assert normalize_text("กิน") != normalize_text("กัน")
    assert normalize_text("क\u093f, है!") == normalize_text(" कि  है")
    assert normalize_text("cafe\u0301") == normalize_text("Café")
    assert normalize_text("I \u2764\ufe0f it") == normalize_text("i \u2764 it")
