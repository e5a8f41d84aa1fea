import pytest

from fedlight.recipes import recipe as recipes


def stages(tmp_path, runs, **others):
    recipe = {"stages": {"runs": runs, **others}}
    return {stage.name: stage for stage in recipes.stages(recipe, tmp_path, 0)}


TABLE = {"call": "fedlight.recipes.method_table.settings_table", "with": {"methods": "${grid:runs}"}}


def fit(*axes, **settings):
    return {"fit": "selector.yaml", "with": {"trainer.max_epochs": 3, **settings}, "grid": [*axes]}


def test_there_is_a_stage_for_every_choice_and_a_reference_to_all_folders(tmp_path):
    methods = {"FedAvg": None, "FedProx, mu 1": {"federated.algorithm": {"class_path": "FedProx"}}}
    limits = {"all": {}, "10 %": {"data.init_args.limit": 10}}
    made = stages(tmp_path, fit(methods, limits), table=TABLE)
    assert [*made] == ["fedavg_all", "fedavg_10", "fedprox_mu_1_all", "fedprox_mu_1_10", "table"]
    assert made["fedavg_all"].arguments == {"trainer.max_epochs": 3}
    changed = {"federated.algorithm": {"class_path": "FedProx"}, "data.init_args.limit": 10}
    assert made["fedprox_mu_1_10"].arguments == {"trainer.max_epochs": 3, **changed}
    places = {"all": "all", "10 %": "10"}
    folders = {name: str(tmp_path / f"fedprox_mu_1_{place}") for name, place in places.items()}
    assert made["table"].arguments["methods"]["FedProx, mu 1"] == folders


def test_an_axis_replaces_settings_and_may_be_a_reference_and_a_later_stage_like_a_cell(tmp_path):
    axis = {"one": {}, "other": {"federated.algorithm": {"class_path": "FedAvg"}}}
    made = stages(tmp_path, fit(axis, **{"federated.algorithm.mu": 1.0}))
    assert made["one"].arguments["federated.algorithm.mu"] == 1.0
    assert "federated.algorithm.mu" not in made["other"].arguments
    made = stages(tmp_path, fit({"one": {}}), longer={"like": "one", "with": {"trainer.max_epochs": 9}})
    assert made["longer"].arguments == {"trainer.max_epochs": 9}
    recipe = {"axes": {"one": {}, "other": None}, "stages": {"runs": fit("${axes}"), "table": TABLE}}
    made = {stage.name: stage for stage in recipes.stages(recipe, tmp_path, 0)}
    assert [*made] == ["one", "other", "table"]
    assert made["table"].arguments["methods"]["other"] == str(tmp_path / "other")


@pytest.mark.parametrize(
    ("axes", "complaint"),
    [
        ([{"a": {}, "A": {}}], "two stages 'a'"),
        ([{}], "a list of axes"),
        ([["a"]], "a list of axes"),
        ([], "a list of axes"),
        ([{"%": {}}], "letters or digits"),
        ([{"a": 3}], "a list of axes"),
    ],
)
def test_wrong_grids_are_refused(tmp_path, axes, complaint):
    with pytest.raises(ValueError, match=complaint):
        stages(tmp_path, fit(*axes))


def test_a_reference_to_no_grid_or_a_wrong_one_is_refused(tmp_path):
    with pytest.raises(ValueError, match="refers to what it does not have"):
        stages(tmp_path, fit({"one": {}}), table=TABLE | {"with": {"methods": "${grid:walks}"}})
    with pytest.raises(ValueError, match="stage runs: grid is a list of axes"):
        stages(tmp_path, fit(3), table=TABLE)
    with pytest.raises(ValueError, match="no stage 'runs' with a grid"):
        stages(tmp_path, {"fit": "selector.yaml"}, table=TABLE)
    recipe = {"stages": {"runs": fit({"one": {}})}, "over_seeds": {"table": TABLE}}
    with pytest.raises(ValueError, match="every"):
        recipes.stages_over_seeds(recipe, tmp_path, [0])
