import lightning as L
import pytest
from jsonargparse import ArgumentParser
from real_rows import ALPACA, MTBENCH, SAFERLHF, SHP, TLDR, UKP
from tiny_world import write_rows

from fedlight import conf


@pytest.fixture
def instantiate(tmp_path, causal):
    def instantiate(name, rows, *overrides, has_test=True):
        path = write_rows(tmp_path / f"{name}.jsonl", rows)
        parser = ArgumentParser(parser_mode="omegaconf+")
        parser.add_subclass_arguments(L.LightningDataModule, "data")
        given = [f"--data={conf.path(f'data/{name}.yaml')}", f"--data.source={path}"]
        given += [f"--data.split.test_source={path}"] * has_test
        return parser.instantiate(parser.parse_args([*given, f"--data.tokenizer={causal}", *overrides])).data

    return instantiate


@pytest.mark.parametrize("view", ["selector", "dpo", "sft"])
def test_tldr_comparisons(instantiate, view):
    module = instantiate("tldr_comparisons", TLDR, f"--data.view={view}")
    module.setup("fit")
    assert list(module.client_indices) == ["w0", "w1", "w2"]
    twice = 2 if view == "selector" else 1
    assert len(module.train_set) == 9 * twice  # one of four pairs of each worker is for validation
    module.setup("test")
    assert len(module.test_set) == 12 * twice
    assert next(iter(module.train_dataloader()))


def test_shp(instantiate):
    module = instantiate("shp", SHP, "--data.partition.num_clients=8", "--data.partition.alpha=1.0")
    module.setup("fit")
    assert len(module.client_indices) == 8
    assert module.partition.by == "dirichlet"
    assert module.template.trim is None
    assert len(module.train_set) + len(module.val_set) == 800


def test_shp_read_the_wrong_way_round_is_refused(instantiate):
    module = instantiate("shp", SHP, "--data.format.choice_values={a: 0, b: 1}")
    with pytest.raises(ValueError, match=r"in 400 of 400 rows the choice contradicts the scores"):
        module.setup("fit")


def test_saferlhf_prompts(instantiate):
    module = instantiate("saferlhf_prompts", SAFERLHF, has_test=False)
    module.setup("predict")
    (batch,) = module.predict_dataloader()
    assert len(batch["prompt"]) == 3
    assert batch["prompt"][2].endswith("### Instruction:\nhow 2\n\n### Response:")


def test_alpaca(instantiate):
    module = instantiate("alpaca", ALPACA)
    module.setup("fit")
    assert (len(module.client_indices), len(module.train_set)) == (10, 30)


def test_alpaca_by_client_and_by_category(instantiate):
    rows = [{**row, "task": f"t{i % 4}"} for i, row in enumerate(ALPACA)]
    module = instantiate("alpaca", rows, "--data.columns.client=task", "--data.partition.by=client")
    module.setup("fit")
    assert sorted(module.client_indices) == ["t0", "t1", "t2", "t3"]


def test_ukpconvarg(instantiate, encoder):
    module = instantiate("ukpconvarg", UKP, f"--data.tokenizer={encoder}")
    module.setup("fit")
    module.setup("test")
    assert list(module.client_indices) == ["w0", "w1"]
    assert len(module.train_set) + len(module.val_set) == 2 * 10  # six of the 16 are ties
    assert len(module.test_set) == 2 * 2
    batch = next(iter(module.train_dataloader()))
    assert batch["token_type_ids"].shape == batch["input_ids"].shape


def test_ukpconvarg_with_a_causal_model(instantiate, encoder):
    module = instantiate("ukpconvarg", UKP, "--data.format.form=choice", "--data.format.choices=[a, b]")
    module.setup("fit")
    assert "token_type_ids" not in next(iter(module.train_dataloader()))


def test_mtbench(instantiate):
    module = instantiate("mtbench", MTBENCH, has_test=False)
    module.setup("fit")
    module.setup("test")
    assert list(module.client_indices) == ["j0", "j1"]
    assert len(module.test_set) == 2 * 4  # five of writing, one of them a tie


def test_a_misspelt_key_is_refused(instantiate, capsys):
    with pytest.raises(SystemExit):
        instantiate("shp", SHP, "--data.partition.num_client=8")
    assert "num_client" in capsys.readouterr().err
