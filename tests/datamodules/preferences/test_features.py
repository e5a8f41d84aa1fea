from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from nested import nested
from stacked import assert_same_rows, fit, furthest
from tiny_world import table

from fedlight import Ditto, FedAvg, FedBiscuit, HashedEncoder, LocalOnly, Optimization, Scaffold
from fedlight.callbacks.logs.client_accuracy import ClientAccuracy
from fedlight.datamodules.preferences.datamodule import PreferenceDataModule
from fedlight.datamodules.rows.rows import write_rows
from fedlight.federation.algorithms import FedRep, KnownGroups, NearestGroups, SoftGroups
from fedlight.modules.feature_selector import FeatureSelectorModule
from fedlight.support.needs import Model

TEXTS = [f"statement {word}" for word in ("red", "green", "blue", "black", "white", "grey")]
COLUMNS = {name: name for name in ("response_a", "response_b", "choice", "client", "group")}


def rows(clients=4, pairs=12):
    """Clients of group 0 prefer the text that comes first in the list, those of group 1 the other one."""
    rng = np.random.default_rng(0)
    made = []
    for client in range(clients):
        for _ in range(pairs):
            first, second = rng.permutation(len(TEXTS))[:2].tolist()
            choice = "ab"[(first > second) ^ (client % 2)]
            made.append((TEXTS[first], TEXTS[second], choice, f"p{client}", f"{client % 2}"))
    return [dict(zip(COLUMNS, row, strict=True)) for row in made]


def of_votes(file, **options):
    settings = {"columns": COLUMNS, "form": "features", "val_share": 0.25, "batch_size": 4, **options}
    return PreferenceDataModule(file, **nested(PreferenceDataModule, **settings))


def selector(**options):
    return FeatureSelectorModule(**{"optimizer": Optimization(name="SGD"), "lr": 0.5, **options})


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    file = tmp_path_factory.mktemp("votes") / "votes.jsonl"
    write_rows(rows(), file)
    return partial(of_votes, str(file))


def test_examples_are_the_vectors_of_both_answers(build):
    data = build(val_share=0, test_source=build().train_rows[0])
    data.setup("fit")
    data.setup("test")
    encoder, by_client = HashedEncoder(), {}  # adding 0 makes -0.0 and 0.0 one
    for row in rows():
        vectors = encoder.encode([row["response_a"], row["response_b"]])
        better = (vectors[0] - vectors[1]) * (-1 if row["choice"] == "b" else 1)
        by_client.setdefault(row["client"], set()).add((better.round(5) + 0.0).tobytes())
    sides = (data.train_set, data.client_indices), (data.test_set, data.test_client_indices)
    for examples, clients in sides:
        assert clients.keys() == by_client.keys()
        for client, indices in clients.items():
            batch = data.collate([examples[index] for index in indices])
            assert batch["features"].shape == (len(indices), 2, 384)
            chosen = torch.arange(len(indices)), batch["labels"]
            better = (batch["features"][chosen] - batch["features"][chosen[0], 1 - chosen[1]]).numpy()
            assert {(one.round(5) + 0.0).tobytes() for one in better} == by_client[client]
    assert data.client_groups == {"p0": "0", "p1": "1", "p2": "0", "p3": "1"}


def test_each_text_is_encoded_once_and_validation_pairs_are_others(build, monkeypatch):
    asked, encode = [], HashedEncoder.encode
    monkeypatch.setattr(HashedEncoder, "encode", lambda own, texts: asked.append(texts) or encode(own, texts))
    data = build()
    data.setup("fit")
    assert [sorted(texts) for texts in asked] == [sorted(TEXTS)]
    for client, indices in data.client_indices.items():
        train = {frozenset(data.train_set.pairs[index]) for index in indices}
        val = {frozenset(data.val_set.pairs[index]) for index in data.val_client_indices[client]}
        assert len(train) + len(val) == len(train | val) > len(train) > 0
    assert data.report.padding == 0


def test_settings_that_do_not_go_together(build):
    with pytest.raises(ValueError, match="form='features' has no text to write: set view='selector'"):
        build(view="dpo")
    with pytest.raises(ValueError, match="set twins_together=false"):
        build(twins_together=True)
    with pytest.raises(ValueError, match=r"data\.encoder='' must be the folder or hub name"):
        build(encoder="")


@pytest.mark.parametrize(
    ("form", "encoder", "needed"),
    [("features", "o/e", 1), ("features", "", 1), ("pair", "o/e", 0), ("features", "hashed", 0)],
)
def test_a_dry_run_looks_for_the_encoder(form, encoder, needed):
    needs = [*PreferenceDataModule.requires({"format": {"form": form, "encoder": encoder}})]
    assert needs == [Model(encoder, is_encoder=True)] * needed


def accuracies(folder):
    """Of each client's own model, from the table of clients."""
    return {row["client"]: float(row["own_accuracy"]) for row in table(folder / "clients.csv")}


@pytest.mark.parametrize("hidden", [0, 3])
@pytest.mark.parametrize("algorithm", [FedAvg, Scaffold, LocalOnly])
def test_clients_side_by_side_train_as_alone(build, algorithm, hidden):
    def run(at_once):
        return fit(selector(hidden=hidden), build(val_share=0), at_once, algorithm=algorithm())

    (alone, rows, _, own), (beside, others, groups, other) = run(1), run(4)
    assert [[len(group) for group in each] for each in groups] == [[4]] * 2
    assert furthest(beside, alone) < 1e-6
    assert_same_rows(others, rows)
    if algorithm is LocalOnly:
        kept = {name for name in own.clients if own.memory.load(name)}
        assert len(kept) == 4
        assert max(furthest(own.own_state(name), other.own_state(name)) for name in kept) < 1e-6


@pytest.mark.parametrize("hidden", [0, 3])
def test_clients_of_several_heads_share_a_batch(build, hidden):
    def run(at_once):
        module = selector(hidden=hidden, num_adapters=3)
        algorithm = FedBiscuit(warmup_rounds=1, regroup_every=1, weighting="normalized")
        loop = {"rounds": 5, "algorithm": algorithm, "settings": {"limit_val_batches": 1.0}}
        return fit(module, build(), at_once, **loop)

    (alone, rows, _, own), (beside, others, groups, other) = run(1), run(4)
    assert own.algorithm.groups == other.algorithm.groups
    assert len({*own.algorithm.groups.values()}) == 3
    assert [len(group) for group in groups[-1]] == [4]
    assert furthest(beside, alone) < 1e-6
    assert_same_rows(others, rows)


def test_own_model_of_a_grouped_client_is_its_selector(build, tmp_path):
    module = selector(num_adapters=2)
    algorithm = FedBiscuit(1, 1, NearestGroups(), weighting="normalized")
    accuracy = ClientAccuracy(str(tmp_path / "clients.csv"), own_models=True)
    data = build(test_source=build().train_rows[0])
    fit(module, data, rounds=6, algorithm=algorithm, callbacks=[accuracy])
    weights = [head.head.weight[0].detach() for head in module.heads.values()]
    expected = {}
    for client, indices in data.test_client_indices.items():
        batch = data.collate([data.test_set[index] for index in indices])
        chosen = (batch["features"] @ weights[algorithm.groups[client]]).argmax(dim=1)
        expected[client] = (chosen == batch["labels"]).float().mean().item()
    assert accuracies(tmp_path) == pytest.approx(expected)
    selectors = {row["client"]: int(row["selector"]) for row in table(tmp_path / "clients.csv")}
    assert selectors == algorithm.groups
    assert {algorithm.groups["p0"], algorithm.groups["p1"]} == {0, 1}
    assert accuracy.summary["own/client_mean"] == pytest.approx(np.mean([*expected.values()]))


def test_known_groups_train_as_a_federation_of_their_own_each(build, tmp_path):
    module = selector(num_adapters=2)
    algorithm = FedBiscuit(0, 1, KnownGroups(), weighting="normalized", group_by="own")
    fit(module, build(val_share=0), rounds=3, algorithm=algorithm)
    assert algorithm.groups == {"p0": 0, "p1": 1, "p2": 0, "p3": 1}
    file = tmp_path / "one_group.jsonl"
    write_rows([row for row in rows() if row["group"] == "0"], file)
    alone, data = selector(), of_votes(str(file), val_share=0)
    fit(alone, data, rounds=3, algorithm=FedAvg(weighting="normalized"), clients_per_round=2)
    found, expected = (of.heads[name].head.weight for of, name in ((module, "adapter0"), (alone, "default")))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    assert not torch.allclose(found, module.heads["adapter1"].head.weight, atol=0.1)


def test_a_client_without_a_known_group_takes_the_nearest(build, tmp_path):
    file = tmp_path / "some.jsonl"
    write_rows([row | {"group": "" if row["client"] == "p3" else row["group"]} for row in rows()], file)
    module, data = selector(num_adapters=3), of_votes(str(file), val_share=0)
    algorithm = FedBiscuit(0, 1, KnownGroups(), weighting="normalized", group_by="own")
    fit(module, data, rounds=6, algorithm=algorithm)
    assert algorithm.groups == {"p0": 0, "p1": 1, "p2": 0, "p3": int(np.argmin(algorithm.losses["p3"]))}
    with pytest.raises(ValueError, match=r"2 groups for 1 selectors: set model.num_adapters=2"):
        fit(selector(), build(val_share=0), algorithm=FedBiscuit(0, 1, KnownGroups(), group_by="own"))
    columns = {name: value for name, value in COLUMNS.items() if name != "group"}
    with pytest.raises(ValueError, match=r"KnownGroups needs groups of the clients: map columns.group"):
        fit(module, build(columns=columns), algorithm=FedBiscuit(0, 1, KnownGroups(), group_by="own"))


def test_own_model_of_a_client_with_weights_is_the_mixture(build, tmp_path):
    module = selector(num_adapters=2)
    algorithm = FedBiscuit(1, 1, SoftGroups(), weighting="normalized", group_by="own")
    accuracy = ClientAccuracy(str(tmp_path / "clients.csv"), own_models=True)
    data = build(test_source=build().train_rows[0])
    fit(module, data, rounds=5, algorithm=algorithm, callbacks=[accuracy])
    heads = [head.head.weight[0].detach() for head in module.heads.values()]
    expected = {}
    for client, indices in data.test_client_indices.items():
        batch = data.collate([data.test_set[index] for index in indices])
        of_b = [torch.sigmoid((batch["features"] @ w).diff(dim=1)[:, 0]) for w in heads]
        pi = algorithm.weights[client]
        chosen = (pi[0] * of_b[0] + pi[1] * of_b[1] > 0.5).long()
        expected[client] = (chosen == batch["labels"]).float().mean().item()
    assert any(min(pi) > 0.01 for pi in algorithm.weights.values())
    assert accuracies(tmp_path) == pytest.approx(expected)


def opposite(file):
    """As many votes of each client, all of them the other way round."""
    write_rows([row | {"choice": "ab"[row["choice"] == "a"]} for row in rows()], file)
    return str(file)


def run(build, folder, source=None, encoder=None, algorithm=None, goes_on=True, **of_module):
    """Weights after training, from the first round's checkpoint if it goes on."""
    data, module = build(val_share=0), selector(hidden=2, **of_module)
    if source is not None:
        data.train_rows = (source(folder / "others.jsonl"), "train")
    data.encoder = encoder or data.encoder
    save = {"filename": "{epoch}", "save_top_k": -1, "save_on_train_epoch_end": True}
    options = {"callbacks": [ModelCheckpoint(folder / "saved", **save)]}
    options["ckpt_path"] = folder / "saved/epoch=0.ckpt" if goes_on else None
    options["settings"] = {"enable_checkpointing": True, "default_root_dir": folder}
    fit(module, data, algorithm=algorithm or Ditto(0.1), **options)
    return dict(module.named_parameters())


@pytest.fixture(scope="module")
def started(build, tmp_path_factory):
    """Folder and weights of a run."""
    folder = tmp_path_factory.mktemp("started")
    return folder, run(build, folder, goes_on=False)


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({}, None),
        ({"lr": 0.25}, r"the checkpoint was trained with lr=0\.5 and goes on with it, not with lr=0\.25"),
        ({"optimizer": Optimization("Adam")}, r"trained with optimizer\.name=SGD"),
        ({"encoder": HashedEncoder(seed=1)}, r"trained with data\.client_examples="),
        ({"source": opposite}, r"trained with data\.client_examples="),
        ({"algorithm": Ditto(0.2)}, r"trained with federated\.algorithm\.lam=0\.1.*not with.*lam=0\.2"),
        ({"algorithm": FedRep()}, r"trained with federated\.algorithm=fedlight\.Ditto"),
    ],
)
def test_a_run_goes_on_with_the_same_settings_encoder_and_votes_alone(build, started, other, message):
    """Features have no lengths by which other examples would be noticed."""
    with pytest.raises(ValueError, match=message) if other else nullcontext():
        assert furthest(started[1], run(build, started[0], **other)) == 0


def with_clients_of_another_group_tested(build, tmp_path, num_adapters, **options):
    """Return the module and what was printed after training on group 1 alone, tested on the clients of group 0, too."""
    file = tmp_path / "group_1.jsonl"
    write_rows([row for row in rows() if row["group"] == "1"], file)
    data = of_votes(str(file), val_share=0.05, test_source=build().train_rows[0])
    module = selector(num_adapters=num_adapters)
    algorithm = FedBiscuit(0, 1, KnownGroups(), weighting="normalized", group_by="own")
    accuracy = ClientAccuracy(str(tmp_path / "clients.csv"), **options)
    fit(module, data, rounds=3, clients_per_round=2, algorithm=algorithm, callbacks=[accuracy])
    return module, algorithm, accuracy


@pytest.mark.parametrize("num_adapters", [1, 2])
def test_groups_of_clients_that_are_only_tested_do_not_number_the_others(build, tmp_path, num_adapters):
    """``own_models`` reads the test rows before training."""
    alone, grouped, _ = with_clients_of_another_group_tested(build, tmp_path, num_adapters)
    seen, other, _ = with_clients_of_another_group_tested(build, tmp_path, num_adapters, own_models=True)
    assert grouped.groups == other.groups == {"p1": 0, "p3": 0}
    assert furthest(dict(alone.named_parameters()), dict(seen.named_parameters())) == 0


def test_a_client_outside_of_the_groups_is_named_where_nobody_votes_for_it(build, tmp_path, caplog):
    *_, accuracy = with_clients_of_another_group_tested(build, tmp_path, 2, own_models=True)
    assert not accuracy.summary
    assert "client 'p0' of the test examples was in no grouping, and an even number of" in caplog.text
    assert "gives no 'correct'" not in caplog.text
    *_, accuracy = with_clients_of_another_group_tested(build, tmp_path, 3, own_models=True)
    assert accuracy.summary["own/without_own_model"] == 2  # p0 and p2 are tested with the vote
