from functools import partial

import pytest
import torch
from nested import nested
from stacked import both_ways, furthest
from tiny_world import VOTES
from transformers import AutoTokenizer, BertConfig, BertModel

from fedlight import Lora, Optimization, PreferenceDataModule, RewardModule, SelectorModule, SFTModule
from fedlight.federation.algorithms import FedAvg, FedBiscuit, FedProx, LocalOnly, Scaffold, SoftGroups
from fedlight.modules import DPOModule
from fedlight.modules.language.base_model import Execution

MODULES = {"selector": SelectorModule, "sft": SFTModule, "dpo": DPOModule, "reward": RewardModule}
ALGORITHMS = {"FedAvg": FedAvg, "FedProx": lambda: FedProx(0.5), "Scaffold": Scaffold, "LocalOnly": LocalOnly}


def make(kind, model, optimizer="SGD", lr=0.02, **settings):
    # At twice the rate the untrained selector multiplies rounding by ten in four steps.
    made = {
        "lora": Lora(rank=2, dropout=0.0),
        "dtype": "fp32",
        "optimizer": Optimization(optimizer),
        "lr": lr,
    }
    module = MODULES[kind](model, **made | settings)
    module.configure_model()
    generator = torch.Generator().manual_seed(7)
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and "lora_B" in name:
            parameter.data.normal_(std=0.05, generator=generator)
    return module


def votes(kind, model, **settings):
    view = {"reward": "dpo"}.get(kind, kind)
    made = {"max_tokens": 128, "batch_size": 4, "val_share": 0, "tokenizer": model}
    return PreferenceDataModule(VOTES, **nested(PreferenceDataModule, view=view, **made | settings))


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_module_under_every_algorithm(algorithm, kind, tiny_model):
    made, data = partial(make, kind, tiny_model), partial(votes, kind, tiny_model)
    loop = {"local_steps": 2, "algorithm": ALGORITHMS[algorithm]()}
    (alone, _, _, own), (_, _, groups, other) = both_ways(made, data, most=1e-5, tolerance=1e-4, **loop)
    assert [[len(group) for group in each] for each in groups] == [[3, 1]] * 2
    if algorithm == "LocalOnly":
        kept = {name for name in own.clients if own.memory.load(name)}
        assert max(furthest(own.own_state(name), other.own_state(name)) for name in kept) < 1e-5
    else:
        assert furthest(alone, {n: p for n, p in made().named_parameters() if n in alone}) > 1e-3


@pytest.fixture(scope="module")
def encoder(tiny_model, tmp_path_factory):
    """A BERT with the words of the tiny model."""
    folder, tokenizer = tmp_path_factory.mktemp("encoder"), AutoTokenizer.from_pretrained(tiny_model)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    BertModel(BertConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


UNLIKE = {
    **{kind: (kind, {}) for kind in MODULES},
    "classifier": ("selector", {"head": "classifier"}),
    # Its bias cancels out of the loss: the gradient is rounding alone, which AdamW makes a whole step of.
    "encoder": ("reward", {"optimizer": "SGD", "lr": 0.02}),
    "nf4": ("dpo", {"base": "nf4"}),
    "computed twice": ("sft", {"execution": Execution(gradient_checkpointing=True)}),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_adamw_with_dropout_and_clipping(name, tiny_model, encoder):
    """Masks follow from a client's batch, so they are those that it has alone."""
    kind, settings = UNLIKE[name]
    model = encoder if name in ("classifier", "encoder") else tiny_model
    settings = {"optimizer": "AdamW", "lr": 1e-3, "lora": Lora(rank=2, dropout=0.2), **settings}
    made = partial(make, kind, model, **settings)
    data, clip = partial(votes, kind, model), {"gradient_clip_val": 0.5}
    both_ways(made, data, 4, most=1e-4, tolerance=1e-4, local_steps=2, settings=clip)


def selectors(model, number, rounds, algorithm):
    """Selectors of six clients at once, as `both_ways` compares them."""
    made = partial(make, "selector", model, lr=0.02, num_adapters=number)
    data = partial(votes, "selector", model, val_share=0.3)
    loop = {"rounds": rounds, "local_steps": 2, "clients_per_round": 6, "algorithm": algorithm}
    settings = {"limit_val_batches": 1.0}
    return both_ways(made, data, 6, most=1e-5, tolerance=1e-4, settings=settings, **loop)


@pytest.mark.parametrize("local", [None, FedProx(0.5)])
def test_clients_of_several_selectors_share_a_batch(local, tiny_model):
    algorithm = FedBiscuit(warmup_rounds=1, regroup_every=1, local=local)
    (*_, own), (_, _, groups, other) = selectors(tiny_model, 3, 5, algorithm)
    assert own.algorithm.groups == other.algorithm.groups
    assert len({*own.algorithm.groups.values()}) == 3
    assert [len(group) for group in groups[-1]] == [6]


def test_clients_with_weights_over_all_selectors_share_the_batches_of_each(tiny_model):
    algorithm = FedBiscuit(1, 1, SoftGroups(), "normalized", group_by="own")
    (*_, own), (_, _, groups, other) = selectors(tiny_model, 2, 4, algorithm)
    assert [len(group) for group in groups[-1]] == [6, 6]  # a visit for each selector
    for client, weights in own.algorithm.weights.items():
        assert other.algorithm.weights[client] == pytest.approx(weights, abs=1e-5)
