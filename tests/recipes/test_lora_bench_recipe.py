import json

import pytest
from recipe_runs import differing, is_drawn, ran, rows_of, stages_of
from tiny_world import write_rows

from fedlight.recipes import recipe as recipes

ALGORITHMS = ("fedavg", "ffalora", "rolora", "fedsalora", "productaverage", "hetlora", "flexlora")
SETTINGS = {"iid": "iid", "Dirichlet": "dirichlet"}
SETTINGS |= {f"{name}, noise": f"{setting}_noise" for name, setting in SETTINGS.items()}
NAMES = [
    *("FedAvg", "FedProx", "FFALoRA", "FFALoRA, FedProx", "RoLoRA", "RoLoRA, FedProx", "FedSALoRA"),
    *("FedSALoRA, FedProx", "ProductAverage", "ProductAverage, FedProx", "HetLoRA", "HetLoRA, FedProx"),
    *("HetLoRA, over holders", "FlexLoRA", "FlexLoRA, FedProx", "FlexLoRA, over holders"),
]
FEW = (
    *("rounds=2", "clients_per_round=2", "clients_at_once=2", "local_steps=1", "batch_size=2"),
    *("accelerator=cpu", "lora_rank=8"),
)
TINY = (
    "source=toy:instructions?seed=${seed}&split=private&client_rows=12",
    "test_source=toy:instructions?seed=${seed}&split=test&topic_rows=1",
    "alpha=5",
    "partitions.unlike.min_size=2",
)


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    return stages_of("lora_bench", tmp_path_factory.mktemp("lora_bench"))


def algorithm_of(stage):
    return stage.arguments["federated.algorithm"]


def test_every_algorithm_in_every_setting_and_nothing_else_differs(stages):
    for name in ALGORITHMS:
        prox = "fedprox" if name == "fedavg" else f"{name}_fedprox"
        for setting in SETTINGS.values():
            plain, held = stages[f"{name}_{setting}"], stages[f"{prox}_{setting}"]
            like = stages[f"fedavg_{setting}"].arguments
            assert differing(plain.arguments, like) <= {"federated.algorithm", "trainer.callbacks"}
            assert differing(held.arguments, plain.arguments) == {"federated.algorithm"}
            local = algorithm_of(held) if name == "fedavg" else algorithm_of(held)["init_args"]["local"]
            assert (local["class_path"], local["init_args"]["mu"]) == ("FedProx", 0.1)
            assert ("ranks" in algorithm_of(plain)["init_args"]) == (name in ("hetlora", "flexlora"))
            assert ("federated.channel" in plain.arguments) == setting.endswith("noise")
            assert plain.arguments["data.init_args.partition"]["by"] == setting.removesuffix("_noise")
            assert algorithm_of(plain)["init_args"]["weighting"] == "normalized"


def test_the_table_shows_each_run_once_under_its_own_name(stages, tmp_path):
    table = stages["table"].arguments["methods"]
    assert list(table) == NAMES
    shown = [folder.rpartition("/")[2] for runs in table.values() for folder in runs.values()]
    assert sorted(shown) == sorted(name for name in stages if name != "table")
    for name, runs in table.items():
        for setting, folder in runs.items():
            stage = stages[folder.rpartition("/")[2]]
            assert stage.name.endswith(SETTINGS[setting])
            algorithm = algorithm_of(stage)
            assert algorithm["class_path"] == name.partition(",")[0]
            assert ("local" in algorithm["init_args"]) == name.endswith(", FedProx")
            assert (algorithm["init_args"].get("missing") == "skip") == name.endswith("over holders")


def with_places(name, folder, *axes):
    """Writes the recipe with some places on the axes of its grid; gives the file's name."""
    recipe = recipes.load(name)
    runs = recipe["stages"]["runs"]
    kept = zip(runs["grid"], axes, strict=True)
    runs["grid"] = [{place: axis[place] for place in places} for axis, places in kept]
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps(recipe))
    return str(file)


@pytest.mark.slow
def test_lora_bench_with_unlike_clients_and_noise(tmp_path, tiny_model):
    methods = ["FedAvg", "RoLoRA", "ProductAverage", "HetLoRA, over holders", "FlexLoRA, FedProx"]
    recipe = with_places("lora_bench", tmp_path, methods, ["Dirichlet", "Dirichlet, noise"])
    changes = (f"model={tiny_model}", *FEW, *TINY, "over_seeds.differences.with.columns=[Dirichlet]")
    outcome = ran("run", recipe, f"--output={tmp_path}", "--seeds", "3", *changes)
    rows = rows_of(tmp_path)
    assert [*rows] == methods
    assert rows["FedAvg"]["epsilon"] == pytest.approx(rows["FlexLoRA, FedProx"]["epsilon"])
    assert is_drawn(tmp_path / "seeds_3/figure/bytes.svg")
    assert "minus FedAvg" in outcome.err


@pytest.mark.slow
def test_lora_bench(tmp_path, tiny_model):
    recipe = with_places("lora_bench", tmp_path, NAMES, ["iid"])
    figure = ("over_seeds.figure.with.y=iid", "over_seeds.differences.with.columns=[iid]")
    changes = (f"model={tiny_model}", *FEW, *TINY, *figure)
    ran("run", recipe, f"--output={tmp_path}", "--seeds", "3", *changes)
    rows = rows_of(tmp_path)
    whole = rows["FedAvg"]
    assert whole["product_error, iid"] > 0
    for method, row in rows.items():
        assert 0 <= row.get("iid", 0) <= 1, method
        assert row["kib_up"] <= whole["kib_up"]
    for method in ("FFALoRA", "RoLoRA"):  # one factor goes up, and the average has no error beside rounding
        assert rows[method]["kib_up"] < 0.6 * whole["kib_up"]
        assert rows[method]["product_error, iid"] < 1e-6
    assert rows["ProductAverage"]["kib_up"] == whole["kib_up"]
    assert rows["HetLoRA"]["kib_up"] < whole["kib_up"]


@pytest.mark.slow
def test_lora_bench_on_instructions(tmp_path, tiny_model):
    rows = [
        {
            "instruction": f"which covers {number} more ?",
            "input": f"eva {thing}",
            "output": f"kind {number % 3}",
            "category": thing,
        }
        for number in range(60)
        for thing in ("roses", "corn")
    ]
    recipe = with_places("lora_bench_instructions", tmp_path, ["FedAvg", "FedSALoRA"], ["iid", "Dirichlet"])
    source = write_rows(tmp_path / "rows.jsonl", rows)
    changes = (f"model={tiny_model}", f"source={source}", "private_rows=100", *FEW, *TINY[2:])
    changes += ("unscored=[FedSALoRA]", "over_seeds.differences.with.columns=[iid, Dirichlet]")
    ran("run", recipe, f"--output={tmp_path}", "--seeds", "3", *changes)
    found = rows_of(tmp_path)
    assert {"iid", "Dirichlet"} < set(found["FedAvg"])
    assert found["FedAvg"]["Dirichlet"] > 0
    assert found["FedSALoRA"]["kib_up"] > 0
    assert "iid" not in found["FedSALoRA"]
