import json

import pytest
from golden_recipes import commands, parsed
from recipe_runs import ran

from fedlight.recipes import recipe as recipes
from fedlight.recipes.stages import Stage
from fedlight.support.files import DIGEST, sealed

TEXTS = [
    "POST : {instruction} {input}\nCHOICE :",
    'she said: "no"\\n',
    "null",
    "no",
    "007",
    "[a",
    "{a",
    "- a",
    "# a",
    "'",
    " a: b ",
    "a\tb",
    "é\u2028\x07",
    "",
]


def stage(folder, **values):
    return Stage("one", folder / "one", {"fit": "feddca.yaml", "with": values})


@pytest.mark.parametrize("text", TEXTS, ids=repr)
def test_any_text_arrives_as_it_is(tmp_path, text):
    columns = {"instruction": text, "response": "output", text: "x"}
    settings = parsed(stage(tmp_path, **{"data.init_args.template": text, "data.init_args.columns": columns}))
    data = settings["data"]["init_args"]
    assert data["template"] == text
    assert data["columns"] == columns
    task = settings["trainer"]["callbacks"][-1]["init_args"]["tasks"]["kitchen"]["init_args"]["data"]
    assert task["init_args"]["template"] == text  # ${data.init_args.template} in the config


@pytest.mark.parametrize("value", [None, 3, 0.5, 1e-9, True, [1, "2"], {"a": None}], ids=repr)
def test_other_values_stay_what_they_are(tmp_path, value):
    place = ("model", "dict_kwargs") if isinstance(value, (list, dict)) else ("data", "init_args")
    found = stage(tmp_path, **{f"{'.'.join(place)}.x": value}).config()[place[0]][place[1]]["x"]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("name", ["feddca", "feddca_table2", "feddca_table2 --twin"])
def test_direct_retrieval_has_no_bound_on_similarity(name, tmp_path):
    direct = next(one for one in commands(name, tmp_path) if one.name.startswith("direct"))
    augmentation = parsed(direct)["data"]["init_args"]["augmentation"]
    assert augmentation["class_path"].endswith("DirectRetrieval")
    assert augmentation["init_args"]["alpha"] is None


def test_what_a_recipe_says_of_a_part_holds_over_the_parts_file_wherever_it_stands(tmp_path):
    stages = {
        "one": {
            "predict": "completions.yaml",
            "with": {"data.init_args.limit": 7, "data": "data/toy_prompts.yaml"},
        },
        "two": {"like": "one", "with": {"data": "data/shp_prompts.yaml"}},
    }
    for one in recipes.stages({"stages": stages}, tmp_path, 0):
        assert one.config()["data"]["init_args"]["limit"] == 7


def test_a_fleet_in_a_file_arrives_whole(tmp_path):
    values = {"federated.fleet": "devices/fleets/phones.yaml", "federated.fleet.scale": 200}
    fleet = parsed(stage(tmp_path, **values))["federated"]["init_args"]["fleet"]["init_args"]
    assert fleet["scale"] == 200
    assert fleet["devices"]["iphone_xr"] == 0.1


def test_results_of_before_are_not_taken_for_results_of_now(tmp_path):
    """A folder from when texts with a colon reached commands changed has no digest of what the command was told."""
    made = stage(tmp_path, **{"data.init_args.template": "a : b"})
    made._check_settings()
    file = tmp_path / "one/settings.json"
    settings = json.loads(file.read_text())
    assert settings.pop("digest of the config")
    file.write_text(json.dumps(sealed({key: value for key, value in settings.items() if key != DIGEST})))
    (tmp_path / "one/rows.jsonl.partial").touch()
    with pytest.raises(ValueError, match=r"one was made with other settings \(digest of the config: nothing"):
        made.refuse_other_settings()


def test_a_moved_folder_has_the_same_settings(tmp_path):
    def of_run(folder, rows="rows"):
        return stage(folder, **{"data.init_args.source": str(folder / rows), "trainer.max_epochs": 7})

    made = of_run(tmp_path / "run")
    made._made_with().write()
    (tmp_path / "run/one/rows.jsonl.partial").touch()
    folder = (tmp_path / "run").rename(tmp_path / "moved")
    of_run(folder).refuse_other_settings()
    with pytest.raises(ValueError, match=r"other settings \(data.init_args.source: .*/rows -> .*/others"):
        of_run(folder, "others").refuse_other_settings()


def test_the_config_that_a_stage_was_told_can_be_used_by_hand(tmp_path):
    made = stage(tmp_path, **{"trainer.max_epochs": 7})
    file = made.write_config(tmp_path)
    outcome = ran("fit", f"--config={file}", "--print_config")
    assert "max_epochs: 7" in outcome.out
