import numpy as np
import pytest
import torch
from plain_lightning import trainer as make_trainer
from tiny_world import make_encoder, table, write_rows

from fedlight import FederatedLoop, LocalOnly, Optimization, PreferenceDataModule, SelectorModule
from fedlight.callbacks.logs.client_accuracy import ClientAccuracy, Outcomes, mix_log_odds
from fedlight.callbacks.loop.run import parameters_of
from fedlight.datamodules.preferences.format import Format
from fedlight.datamodules.rows.split import Split
from fedlight.evaluation.bootstrap import bootstrap_interval

# Two comparisons in both orders, the label of each, and the log-odds of the right answer under three selectors.
ORDERS, LABELS = np.array([0, 7, 1, 6]), np.array([1, 0, 0, 1])
LOG_ODDS = np.array([[3.0, -1.0, 2.0], [0.5, 4.0, -3.0], [-2.0, -1.0, -1.0], [-1.0, 1.0, -3.0]])
# Sums over the orders, by comparison: 1, -2, 1 of comparison 0, and -0.5, 5, -6 of comparison 3.


def outcomes(log_odds=LOG_ODDS, orders=ORDERS):
    return Outcomes(log_odds > 0, None, log_odds, orders, LABELS)


@pytest.mark.parametrize(
    ("selector", "first", "second"), [(0, 1.0, 0.0), (1, 0.0, 1.0), (2, 1.0, 0.0), (None, 1.0, 0.0)]
)
def test_a_selector_or_the_vote_by_hand(selector, first, second):
    right, comparisons = outcomes().own_both_orders(selector, None)
    assert comparisons.tolist() == [0, 3, 0, 3]
    assert right.tolist() == [first, second, first, second]


def test_a_mixture_by_probabilities():
    weights = [0.5, 0.2, 0.3]
    mixed = (1 / (1 + np.exp(-LOG_ODDS))) @ weights
    odds = np.log(mixed / (1 - mixed))
    np.testing.assert_allclose(mix_log_odds(LOG_ODDS, weights), odds)
    np.testing.assert_array_equal(odds > 0, 0.5 * (1 + np.tanh(0.5 * LOG_ODDS)) @ weights > 0.5)
    right, _ = outcomes().own_both_orders(0, weights)
    assert right.tolist() == [float(odds[at] + odds[other] > 0) for at, other in enumerate([2, 3, 0, 1])]
    np.testing.assert_allclose(mix_log_odds(LOG_ODDS, [0, 1, 0]), LOG_ODDS[:, 1])
    assert np.isfinite(mix_log_odds(np.array([[900.0, -900.0]]), [0.5, 0.5])).all()


def test_where_it_is_not_known():
    nothing = outcomes(orders=None), outcomes(LOG_ODDS[:, :2]), outcomes(orders=np.array([0, 2, 4, 6]))
    assert [len(own.own_both_orders(None, None)[0]) for own in nothing] == [0, 0, 0]


@pytest.mark.usefixtures("any_text")
def test_after_local_training(tmp_path):
    rng = np.random.default_rng(0)
    words = [f"word{letter}" for letter in "abcdefghijklmnop"]
    shown = [(" ".join(rng.choice(words, 3)), " ".join(rng.choice(words, 4))) for _ in range(8)]
    rows = [
        {"prompt": "p", "response_a": a, "response_b": b, "choice": "ab"[rng.integers(2)], "client": client}
        for client in ("u", "v", "w")
        for a, b in shown
    ]
    source, encoder = write_rows(tmp_path / "votes.jsonl", rows), make_encoder(tmp_path / "encoder")
    data = PreferenceDataModule(
        source,
        split=Split(test_source=source, val_share=0),
        columns={name: name for name in rows[0]},
        format=Format(form="pair", pair_template=""),
        tokenizer=encoder,
        max_tokens=64,
        batch_size=4,
        eval_batch_size=3,
    )
    sgd = Optimization(name="SGD")
    module = SelectorModule(encoder, head="classifier", dtype="fp32", optimizer=sgd, lr=2.0)
    loop = FederatedLoop(LocalOnly(), clients_per_round=2, local_steps=4)
    accuracy = ClientAccuracy(str(tmp_path / "clients.csv"), own_models=True)
    trainer = make_trainer(1, [loop, accuracy], limit_val_batches=0, default_root_dir=tmp_path)
    trainer.fit(module, data)
    module.eval()
    right, of, own_states, by_client = [], [], 0, {}
    for client, indices in data.test_client_indices.items():
        own_states += loop.own_state(client) is not None
        with parameters_of(module, loop.own_state(client) or {}), torch.no_grad():
            batch = data.collate([data.test_set[index] for index in indices.tolist()])
            logits = module.choice_logits(batch)
        odds = dict(zip(batch["orders"].tolist(), (logits[:, 1] - logits[:, 0]).tolist(), strict=True))
        for order, label in zip(batch["orders"].tolist(), batch["labels"].tolist(), strict=True):
            right.append(float((odds[order] > odds[order ^ 1]) == label))
            of.append(order // 2)
        by_client[client] = np.mean(right[-len(indices) :])
    written = {row["client"]: float(row["own_both_orders"]) for row in table(tmp_path / "clients.csv")}
    assert written == pytest.approx(by_client)
    assert len({*written.values()}) > 1
    assert own_states == 2  # the third client was not drawn
    assert len(right) == 3 * 8 * 2
    assert accuracy.summary["own/accuracy_both_orders"] == pytest.approx(np.mean(right))
    sort = np.argsort(of, kind="stable")
    interval = bootstrap_interval(np.array(right)[sort], np.array(of)[sort])
    assert accuracy.summary["own/accuracy_both_orders_low"] == interval.low < interval.high
    assert accuracy.summary["own/accuracy_both_orders_high"] == interval.high
    assert accuracy.summary["own/accuracy"] != accuracy.summary["own/accuracy_both_orders"]
