import pytest
from jsonargparse import ArgumentParser
from real_rows import ALPACA, MTBENCH, SAFERLHF, SHP, TLDR, UKP
from tiny_world import write_rows

from fedlight import InstructionDataModule, PreferenceDataModule, PromptDataModule, conf

KINDS = (InstructionDataModule, PreferenceDataModule, PromptDataModule)  # which configs name by short names


@pytest.fixture
def instantiate(tmp_path, causal):
    def instantiate(name, rows, *overrides, has_test=True):
        path = write_rows(tmp_path / f"{name}.jsonl", rows)
        parser = ArgumentParser(parser_mode="omegaconf+")
        parser.add_subclass_arguments(KINDS, "data")
        given = [f"--data={conf.path(f'data/{name}.yaml')}", f"--data.source={path}"]
        given += [f"--data.split.test_source={path}"] * has_test
        return parser.instantiate(parser.parse_args([*given, f"--data.tokenizer={causal}", *overrides])).data

    return instantiate


BY_TASK = [{**row, "task": f"t{i % 4}"} for i, row in enumerate(ALPACA)]
TASKS = ("--data.columns.client=task", "--data.partition.by=client")
EIGHT = ("--data.partition.num_clients=8", "--data.partition.alpha=1.0")
CAUSAL = ("--data.format.form=choice", "--data.format.choices=[a, b]")


WORKERS, CLIENTS = ["w0", "w1", "w2"], [f"c{n}" for n in range(10)]


@pytest.mark.parametrize(
    ("name", "rows", "overrides", "clients", "sizes"),
    [
        # one of four pairs validates
        ("tldr_comparisons", TLDR, ("--data.view=selector",), WORKERS, (18, 6, 24)),
        ("tldr_comparisons", TLDR, ("--data.view=dpo",), WORKERS, (9, 3, 12)),
        ("tldr_comparisons", TLDR, ("--data.view=sft",), WORKERS, (9, 3, 12)),
        ("shp", SHP, EIGHT, CLIENTS[:8], (766, 34, 800)),
        ("alpaca", ALPACA, (), CLIENTS, (30, 10, 40)),
        ("alpaca", BY_TASK, TASKS, ["t0", "t1", "t2", "t3"], (36, 4, 40)),
        ("ukpconvarg", UKP, (), WORKERS[:2], (16, 4, 4)),  # six of the 16 are ties
        ("ukpconvarg", UKP, CAUSAL, WORKERS[:2], (16, 4, 4)),
        ("mtbench", MTBENCH, (), ["j0", "j1"], (16, 4, 8)),  # five of writing, one of them a tie
    ],
)
def test_clients_and_sizes(instantiate, encoder, name, rows, overrides, clients, sizes):
    """Examples of training, of validation and of the test."""
    is_pair = name == "ukpconvarg" and not overrides
    more = [f"--data.tokenizer={encoder}"] * is_pair
    module = instantiate(name, rows, *overrides, *more, has_test=name != "mtbench")
    module.setup("fit")
    module.setup("test")
    assert list(module.client_indices) == clients
    assert tuple(map(len, (module.train_set, module.val_set, module.test_set))) == sizes
    assert ("token_type_ids" in next(iter(module.train_dataloader()))) == is_pair
    assert (module.partition.by == "dirichlet", module.template.trim is None) == (name == "shp",) * 2


def test_saferlhf_prompts(instantiate):
    module = instantiate("saferlhf_prompts", SAFERLHF, has_test=False)
    module.setup("predict")
    (batch,) = module.predict_dataloader()
    assert len(batch["prompt"]) == 3
    assert batch["prompt"][2].endswith("### Instruction:\nhow 2\n\n### Response:")
