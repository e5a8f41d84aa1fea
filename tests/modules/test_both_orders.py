import json

import numpy as np
import pytest
import torch
from nested import nested
from text_batches import make_choice_batch
from tiny_world import make_encoder, write_rows
from torch.utils._python_dispatch import TorchDispatchMode
from tuned import tuned

from fedlight.datamodules.preferences.datamodule import PreferenceDataModule
from fedlight.evaluation.bootstrap import bootstrap_interval
from fedlight.evaluation.judge import judge_both_orders
from fedlight.modules.both_orders import BothOrders
from fedlight.modules.selector import SelectorModule

WORDS = [f"word{letter}" for letter in "abcdefghijklmnop"]


def by_loops(orders, log_odds, labels):
    """Mean log-odds of an answer over the two orders, selector by selector, then their majority."""
    right, of = [], []
    for order, label in zip(orders.tolist(), labels.tolist(), strict=True):
        same = [k for k, other in enumerate(orders.tolist()) if other == order]
        swapped = [
            k for k, other in enumerate(orders.tolist()) if other // 2 == order // 2 and other != order
        ]
        if swapped:
            votes = 0
            for selector in range(log_odds.shape[1]):
                mean = (log_odds[same[0], selector] - log_odds[swapped[0], selector]) / 2
                votes += int(mean > 0) - int(mean < 0)
            right.append(0.5 if votes == 0 else float((votes > 0) == (label == 1)))
            of.append(order // 2)
    return right, of


@pytest.mark.parametrize("selectors", [1, 3])
def test_it_is_the_loop(selectors):
    rng = np.random.default_rng(selectors)
    rows = np.concatenate([2 * rng.choice(40, 25) + rng.integers(2, size=25), [90, 91, 95]])
    orders = rng.permutation(np.concatenate([rows, rows[:12] ^ 1]))
    values = {order: rng.normal(size=selectors).round(1) for order in np.unique(orders)}
    log_odds = np.stack([values[order] for order in orders])
    labels = rng.integers(2, size=len(orders))
    right, comparisons = judge_both_orders(orders, log_odds, labels)
    expected, of = by_loops(orders, log_odds, labels)
    assert 10 < len(expected) < len(orders)  # some have no other order
    assert right.tolist() == expected
    assert comparisons.tolist() == of


def test_an_undecided_verdict_counts_half():
    """The same log-odds in both orders: the answer is not looked at."""
    right, _ = judge_both_orders(np.array([0, 1]), np.array([[2.0], [2.0]]), np.array([1, 0]))
    assert right.tolist() == [0.5, 0.5]


def test_pairs_are_joined_across_batches_and_processes():
    rng = torch.Generator().manual_seed(0)
    orders = torch.randperm(60, generator=rng)
    logits, labels = torch.randn(60, 3, 2, generator=rng), torch.randint(2, (60,), generator=rng)
    whole = BothOrders()
    whole.update(orders, logits, labels)
    found = whole.compute()
    odds = (logits[..., 1].double() - logits[..., 0].double()).numpy()
    right, comparisons = judge_both_orders(orders.numpy(), odds, labels.numpy())
    by_comparison = np.argsort(comparisons, kind="stable")
    interval = bootstrap_interval(right[by_comparison], comparisons[by_comparison])
    assert found == {
        "accuracy_both_orders": right.mean(),
        "accuracy_both_orders_low": interval.low,
        "accuracy_both_orders_high": interval.high,
    }
    assert interval.low < right.mean() < interval.high
    pieces = BothOrders()
    for batch in zip(*(part.split([7, 30, 23]) for part in (orders, logits, labels)), strict=True):
        pieces.update(*batch)
    assert pieces.compute() == found
    # As torchmetrics exchanges states: each process has every third example, and all get all.
    parts = [BothOrders() for _ in range(3)]
    for rank, part in enumerate(parts):
        part.update(orders[rank::3], logits[rank::3], labels[rank::3])

    def gather(own, group):
        (name,) = (
            name for name in ("orders", "log_odds", "labels") if torch.equal(own, *getattr(parts[0], name))
        )
        return [torch.cat(getattr(part, name)) for part in parts]

    first = BothOrders(dist_sync_fn=gather, distributed_available_fn=lambda: True)
    first.update(orders[::3], logits[::3], labels[::3])
    assert first.compute() == pytest.approx(found, rel=1e-12)


class NoDoubles(TorchDispatchMode):
    """Device without fp64, as Apple's GPUs are."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        assert not (isinstance(found, torch.Tensor) and found.dtype == torch.float64), func
        return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_device_without_doubles_can_take_batches(dtype):
    """Logits in bf16 are subtracted in fp32: 1.0078125 - 300 has no bf16."""
    metric = BothOrders()
    logits = torch.tensor([[[300.0, 1.0078125]], [[2.0, 0.5]]], dtype=dtype)
    with NoDoubles():
        metric.update(torch.tensor([0, 1]), logits, torch.tensor([0, 1]))
    assert metric.log_odds[0].tolist() == [[logits[0, 0, 1].item() - 300.0], [-1.5]]
    assert metric.compute() == {"accuracy_both_orders": 1.0}  # one comparison has no interval


def test_a_verdict_that_is_not_a_number_is_not_left_out():
    metric, logits = BothOrders(), torch.randn(6, 1, 2, generator=torch.Generator().manual_seed(0))
    logits[0] = float("nan")
    metric.update(torch.arange(6), logits, torch.arange(6) % 2)
    found = metric.compute()
    assert [*found] == ["accuracy_both_orders"]
    assert np.isnan(found["accuracy_both_orders"])


@pytest.fixture(scope="module")
def votes(tmp_path_factory):
    rng = np.random.default_rng(0)
    rows = [
        {
            "prompt": "which",
            "response_a": " ".join(rng.choice(WORDS, 5)),
            "response_b": " ".join(rng.choice(WORDS, rng.integers(2, 9))),
            "choice": "ab"[rng.integers(2)],
        }
        for _ in range(21)
    ]
    rows += [{**row, "choice": "ba"[row["choice"] == "b"]} for row in rows[:4]]  # voted both ways
    folder = tmp_path_factory.mktemp("votes")
    return write_rows(folder / "votes.jsonl", rows), make_encoder(folder / "encoder")


def data_of(votes, eval_batch_size, *sides):
    """The encoder, and the votes to train on and on the sides named."""
    source, encoder = votes
    columns = {name: name for name in ("prompt", "response_a", "response_b", "choice")}
    settings = {"form": "pair", "pair_template": "", "tokenizer": encoder, "max_tokens": 64}
    settings |= {"columns": columns, "eval_batch_size": eval_batch_size, **dict.fromkeys(sides, source)}
    return encoder, PreferenceDataModule(source, **nested(PreferenceDataModule, **settings))


def outcome(votes, trainer, eval_batch_size, num_adapters):
    encoder, data = data_of(votes, eval_batch_size, "test_source")
    module = SelectorModule(encoder, head="classifier", num_adapters=num_adapters, dtype="fp32", seed=2)
    tuned(module, 0.5, parts=("lora_B", "classifier"))
    return trainer.test(module, data, verbose=False)[0], module, data


@pytest.mark.parametrize("num_adapters", [1, 3])
@pytest.mark.parametrize("eval_batch_size", [5, 64])
def test_what_fedlight_test_logs(votes, make_trainer, eval_batch_size, num_adapters):
    metrics, module, data = outcome(votes, make_trainer(), eval_batch_size, num_adapters)
    logits, orders, labels = [], [], []
    module.eval()
    with torch.no_grad():
        for batch in data.test_dataloader():
            logits.append(module.ensemble_logits(batch))
            orders.append(batch["orders"])
            labels.append(batch["labels"])
    odds = torch.cat(logits).double()
    odds = (odds[..., 1] - odds[..., 0]).numpy()
    right, of = by_loops(torch.cat(orders).numpy(), odds, torch.cat(labels).numpy())
    assert len(right) == 50  # 25 votes, each in two orders
    assert len(set(of)) == 21
    assert metrics["test/accuracy_both_orders"] == pytest.approx(np.mean(right))
    by_comparison = np.argsort(of, kind="stable")
    low, high = bootstrap_interval(np.array(right)[by_comparison], np.array(of)[by_comparison])
    assert metrics["test/accuracy_both_orders_low"] == pytest.approx(low)
    assert metrics["test/accuracy_both_orders_high"] == pytest.approx(high)
    assert metrics["test/accuracy_both_orders"] != metrics["test/accuracy"]


def test_cut_passes_and_other_batches(votes, make_trainer, loader, llama):
    """One example alone has no other order, and batches without orders are tested as ever."""
    metrics, *_ = outcome(votes, make_trainer(limit_test_batches=1), 1, 1)
    assert not [name for name in metrics if "both_orders" in name]
    [metrics] = make_trainer().test(SelectorModule(llama), loader([make_choice_batch()]), verbose=False)
    assert set(metrics) == {"test/loss", "test/accuracy"}


@pytest.mark.usefixtures("any_text")
def test_validation_logs_it_after_each_pass(votes, make_trainer):
    encoder, data = data_of(votes, 7, "val_source")
    module = SelectorModule(encoder, head="classifier", dtype="fp32", lr=0.01)
    trainer = make_trainer(max_epochs=2, limit_train_batches=1)
    trainer.fit(module, data)
    fitted = trainer.callback_metrics["val/accuracy_both_orders"]
    [again] = make_trainer().validate(module, data, verbose=False)  # states of an earlier pass are gone
    assert again["val/accuracy_both_orders"] == pytest.approx(fitted.item())
    assert json.dumps({name: again[name] for name in sorted(again)}).count("both_orders") == 3


@pytest.mark.usefixtures("any_text")
@pytest.mark.parametrize("stage", ["val", "test"])
def test_an_interrupted_pass_leaves_no_examples(votes, make_trainer, stage, monkeypatch):
    """The pass before broke off at its third batch, where the model gave other numbers."""
    encoder, data = data_of(votes, 4, "val_source", "test_source")
    module = SelectorModule(encoder, head="classifier", dtype="fp32")
    evaluate = {"val": make_trainer().validate, "test": make_trainer().test}[stage]
    [expected] = evaluate(module, data, verbose=False)
    logits, calls = module.ensemble_logits, []

    def break_off(batch):
        calls.append(batch)
        if len(calls) == 3:
            raise MemoryError("third batch")
        return -logits(batch)

    with monkeypatch.context() as patch, pytest.raises(MemoryError, match="third"):
        patch.setattr(module, "ensemble_logits", break_off)
        evaluate(module, data, verbose=False)
    [found] = evaluate(module, data, verbose=False)
    assert len(expected) == 5
    assert found == expected
