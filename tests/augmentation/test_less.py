import random
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from fedlight import LESS, Lora
from fedlight.augmentation.less import less as less_scores
from fedlight.augmentation.less.example_gradients import ExampleGradients
from fedlight.augmentation.less.warm_up import WarmUp
from fedlight.toy import world

ADAPTER, WARM_UP = partial(Lora, 2, 4, 0.0, r".*\.[qkvo]_proj"), WarmUp(0.3, 2, 3, 0.01)
SMALL = {"dtype": "fp32", "lora": ADAPTER(), "warmup": WARM_UP, "dimension": 128}
SMALL |= {"gradients": ExampleGradients(batch_size=4), "max_tokens": 80}
SMALL |= {"template": "{instruction}", "device": "cpu"}


def make_rows(kinds, seed):
    """Rows whose response is the object, the name twice, or a filler and the verb of a fact, by their kind."""
    rng = random.Random(seed)
    rows = []
    for kind in kinds:
        name, verb, thing = rng.choice(world.NAMES), rng.choice(world.VERBS), rng.choice(world.OBJECTS)
        responses = (thing, f"{name} {name}", f"{rng.choice(world.FILLERS)} {verb}")
        rows.append({"instruction": f"{name} {verb} {thing} .", "input": "", "response": responses[kind]})
    return rows


PUBLIC = make_rows([row % 3 for row in range(30)], seed=0)
CLIENTS = {"a": make_rows([0] * 5, seed=1), "b": make_rows([1] * 3, seed=2)}


def rows_of(added):
    return {client: [one.row for one in rows] for client, rows in added.items()}


def scores_of(added):
    return {client: [one.score for one in rows] for client, rows in added.items()}


def written_out(model, seed):
    """Scores ``(public, clients)`` by one backward pass for each row and full gradients, without projection."""
    less = LESS(model, 1, **SMALL)
    from fedlight.pretrained.hub import load_tokenizer

    tokenizer, device = load_tokenizer(model), torch.device("cpu")
    public = less._read(tokenizer, PUBLIC, device)
    owned = [less._read(tokenizer, rows, device) for rows in CLIENTS.values()]
    module = less._new_module(seed)
    module.configure_model()
    weights = [weight for weight in module.parameters() if weight.requires_grad]
    optimizer = torch.optim.Adam(weights, lr=1)

    def gradient(rows, index):
        loss = module.example_losses(rows.batch([index])).sum()
        return torch.cat([part.flatten() for part in torch.autograd.grad(loss, weights)]).double()

    scores, total, step = np.zeros((len(PUBLIC), len(CLIENTS))), 0.0, 0
    epochs = less._warm_up_batches(public.examples.lengths, seed)
    steps = sum(map(len, epochs))
    for batches in epochs:
        rates = []
        for batch in batches:
            rates.append(0.01 * (steps - step) / steps)  # a rise of one step
            optimizer.param_groups[0]["lr"] = rates[-1]
            optimizer.zero_grad()
            module.example_losses(public.batch(batch)).mean().backward()
            optimizer.step()
            step += 1
        moments = [
            torch.cat([optimizer.state[weight][name].flatten() for weight in weights]).double()
            for name in ("exp_avg", "exp_avg_sq")
        ]
        rate = sum(rates) / len(rates)
        aims = [torch.stack([gradient(rows, row) for row in range(len(rows))]).mean(dim=0) for rows in owned]
        for row in range(len(PUBLIC)):
            g = gradient(public, row)
            mean = (0.9 * moments[0] + 0.1 * g) / (1 - 0.9 ** (step + 1))
            square = (0.999 * moments[1] + 0.001 * g**2) / (1 - 0.999 ** (step + 1))
            direction = mean / (square + 1e-8).sqrt()
            for column, aim in enumerate(aims):
                scores[row, column] += rate * float(torch.cosine_similarity(direction, aim, dim=0))
        total += rate
    return scores / total


@pytest.mark.parametrize("way", ["func", "layers"])
def test_equals_the_equations_written_out(tiny_model, monkeypatch, way):
    """Without projection to the last digits; with it each score is off by about 1 / sqrt(dimension)."""
    expected = written_out(tiny_model, seed=3)

    class Whole:
        def __init__(self, *arguments):
            pass

        def __call__(self, vectors):
            return torch.cat([part.flatten(1) for part in vectors.values()], dim=1)

    options = {**SMALL, "gradients": ExampleGradients(way, 4)}
    projected = LESS(tiny_model, 30, **options).augment(CLIENTS, PUBLIC, seed=3)
    monkeypatch.setattr(less_scores, "RandomProjection", Whole)
    added = LESS(tiny_model, 30, **options).augment(CLIENTS, PUBLIC, seed=3)
    for column, client in enumerate(CLIENTS):
        assert sorted(rows_of(added)[client]) == list(range(30))
        assert scores_of(added)[client] == sorted(scores_of(added)[client], reverse=True)
        assert all(one.fields == PUBLIC[one.row] for one in added[client])
        for found, tolerance in ((added, 1e-4), (projected, 4 / 128**0.5)):
            errors = [abs(one.score - expected[one.row, column]) for one in found[client]]
            assert max(errors) < tolerance
    assert expected.std() > 0.02  # so that equal scores mean something


def test_a_row_follows_from_seed_and_texts_alone(tiny_model):
    """Not from the size of batches, from what was drawn before, or from how many are wanted; and it draws nothing.

    Nor do clients change each other's rows.
    """
    first = LESS(tiny_model, 6, **SMALL).augment(CLIENTS, PUBLIC, seed=0)
    torch.rand(5)
    np.random.rand(5)
    state = torch.get_rng_state()
    options = {**SMALL, "gradients": ExampleGradients(batch_size=7)}
    second = LESS(tiny_model, 4, **options).augment(CLIENTS, PUBLIC, seed=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert {client: rows[:4] for client, rows in rows_of(first).items()} == rows_of(second)
    other = LESS(tiny_model, 4, **SMALL).augment(CLIENTS, PUBLIC, seed=1)
    assert scores_of(other) != scores_of(second)
    assert LESS(tiny_model, 6, **SMALL).augment(CLIENTS, PUBLIC, seed=0) == first
    alone = LESS(tiny_model, 6, **SMALL).augment({"b": CLIENTS["b"]}, PUBLIC, seed=0)
    assert rows_of(alone)["b"] == rows_of(first)["b"]


def test_rows_of_the_clients_own_kind_are_chosen():
    """By the embedded model: of 10 rows for each client, where a third would be right by chance, nearly all are."""
    clients = {f"c{kind}": make_rows([kind] * 6, seed=kind + 10) for kind in range(3)}
    public = make_rows([row % 3 for row in range(60)], seed=4)
    options = SMALL | {"lora": replace(ADAPTER(), rank=4), "warmup": replace(WARM_UP, lr=1e-3)}
    options |= {"template": "alpaca", "dimension": 1024, "gradients": ExampleGradients(batch_size=12)}
    added = LESS("toy", 10, **options).augment(clients, public, seed=0)
    for kind in range(3):
        rows = rows_of(added)[f"c{kind}"]
        assert len(rows) == len(set(rows)) == 10
        assert sum(row % 3 == kind for row in rows) >= 9


def test_what_does_not_fit(tiny_model):
    """Rows that are too long are neither chosen nor learned from; a client of such rows alone gets none."""
    long = {"instruction": "anna bakes bread . " * 30, "input": "", "response": "anna " * 90}
    public = [long, *PUBLIC[:8], long]
    clients = {"a": [long, *CLIENTS["a"]], "long": [long]}
    less = LESS(tiny_model, 20, **SMALL)
    added = less.augment(clients, public, seed=0)
    assert sorted(rows_of(added)["a"]) == list(range(1, 9))
    assert added["long"] == []
    record = less.record()
    assert (record["public_rows_too_long"], record["clients_without_rows"]) == (2, 1)
    assert (record["warmup_rows"], record["client_sends_bytes"]) == (2, 2 * 128 * 4)
    short = less.augment({"a": CLIENTS["a"]}, PUBLIC[:8], seed=0)
    assert rows_of(added)["a"] == [row + 1 for row in rows_of(short)["a"]]
    assert less.augment(CLIENTS, [], seed=0) == {"a": [], "b": []}
    with pytest.raises(ValueError, match=r"no public row fits into max_tokens=80: raise it"):
        less.augment(clients, [long], seed=0)
    with pytest.raises(ValueError, match=r"no client's row fits into max_tokens=80: raise it"):
        less.augment({"long": [long]}, PUBLIC, seed=0)


def test_a_run_that_was_killed_goes_on(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(less_scores, "BLOCK", 8)
    expected = LESS(tiny_model, 5, **SMALL).augment(CLIENTS, PUBLIC, seed=0)
    taken, killed_at = [], 60
    take = less_scores.gradient_features

    def counting(module, batch, *arguments):
        if sum(taken) >= killed_at:
            raise KeyboardInterrupt
        taken.append(len(batch["input_ids"]))
        return take(module, batch, *arguments)

    monkeypatch.setattr(less_scores, "gradient_features", counting)
    kept = {**SMALL, "cache": str(tmp_path)}
    with pytest.raises(KeyboardInterrupt):
        LESS(tiny_model, 5, **kept).augment(CLIENTS, PUBLIC, seed=0)
    (folder,) = tmp_path.iterdir()
    # 8 rows of clients and 30 public ones in the first epoch; 8 and then two blocks of 8 in the second.
    assert sorted(file.stem for file in folder.glob("*.npy")) == ["0-0", "0-1", "0-2", "0-3", "1-0", "1-1"]
    (folder / "0-1.npy").write_bytes(b"cut off")
    taken.clear()
    # Other sizes of batches, and more rows wanted: the same scores.
    other = {**kept, "gradients": ExampleGradients(batch_size=5)}
    added = LESS(tiny_model, 5, **other).augment(CLIENTS, PUBLIC, seed=0)
    assert rows_of(added) == rows_of(expected)
    assert scores_of(added)["a"] == pytest.approx(scores_of(expected)["a"], abs=1e-5)
    assert sum(taken) == 2 * 8 + 8 + 14
    taken.clear()
    more = LESS(tiny_model, 9, **kept).augment(CLIENTS, PUBLIC, seed=0)
    assert {client: rows[:5] for client, rows in more.items()} == added
    assert sum(taken) == 2 * 8
    taken.clear()
    other = {**kept, "lora": replace(ADAPTER(), rank=3)}  # nothing is mixed up
    LESS(tiny_model, 5, **other).augment(CLIENTS, PUBLIC[:5], seed=0)
    assert sum(taken) == 2 * (8 + 5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"number": 0}, "number=0 must be at least 1"),
        (lambda: {"warmup": WarmUp(share=0)}, r"warmup.share=0 must be in \(0, 1\]"),
        (lambda: {"warmup": WarmUp(epochs=0)}, "epochs=0 must be at least 1"),
        ({"dimension": 0}, "dimension=0 must be at least 1"),
        (lambda: {"gradients": ExampleGradients(batch_size=0)}, "batch_size=0 must be at least 1"),
        ({"base": "nf4", "gradients": ExampleGradients("func")}, "set it to 'layers'"),
        ({"base": "int4"}, "did you mean 'int8'"),
        (lambda: {"gradients": ExampleGradients("layer")}, "did you mean 'layers'"),
        (lambda: {"lora": Lora(dropout=2)}, r"lora.dropout=2 must be in \[0, 1\)"),
        ({"warmup": WarmUp(lr=0)}, r"lr=0 must be in \(0"),
        ({"template": "alpacca"}, "alpaca"),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_read(change, message):
    with pytest.raises(ValueError, match=message):
        change = change() if callable(change) else change
        LESS(**{"model": "no/such/model", "number": 3, **SMALL, **change})


def test_settings_hold_what_the_result_depends_on(tiny_model):
    less = LESS(tiny_model, 3, **SMALL)
    assert less.settings() == {"class": "LESS", "model": tiny_model, "number": 3, "base": "plain"} | {
        name: value for name, value in SMALL.items() if name not in ("gradients", "device")
    } | {name: {"class": type(SMALL[name]).__name__, **vars(SMALL[name])} for name in ("lora", "warmup")}
