import math

import adapted
import numpy as np
import pytest
import torch
from nested import nested
from text_batches import make_choice_batch
from tiny_world import write_rows

from fedlight.datamodules.preferences.datamodule import PreferenceDataModule
from fedlight.evaluation.judge import calibrate_letters
from fedlight.modules.both_orders import average_orders
from fedlight.modules.functional import choice_loss
from fedlight.modules.language.adapters import Lora
from fedlight.modules.selector import SelectorModule, read_letters
from fedlight.recipes import steps
from fedlight.support.files import write_json


def ready(*args, **kwargs) -> SelectorModule:
    return adapted.ready(SelectorModule(*args, dtype="fp32", **kwargs)).eval()


def both_orders(batch):
    return {**batch, "orders": torch.tensor([6, 7, 2, 3]), "labels": torch.tensor([0, 1, 1, 0])}


def test_by_hand():
    """A is preferred by 2.65 nats wherever it stands, and the second answer of the comparison by 0.14."""
    logits = torch.tensor([[2.65 - 0.14, 0.0], [2.65 + 0.14, 0.0]])
    averaged = average_orders(logits, torch.tensor([8, 9]))
    torch.testing.assert_close(averaged[:, 0] - averaged[:, 1], torch.tensor([-0.14, 0.14]))
    losses = choice_loss(averaged, torch.tensor([1, 0]))
    expected = math.log1p(math.exp(-0.14))
    torch.testing.assert_close(losses, torch.tensor([expected, expected]))
    several = average_orders(torch.stack([logits, -logits], dim=1), torch.tensor([8, 9]))
    torch.testing.assert_close(several, torch.stack([averaged, -averaged], dim=1))


def test_the_loss_is_of_the_difference(llama):
    batch = both_orders(make_choice_batch(4))
    module = ready(llama, orders="both")
    a_over_b = -module.choice_logits(batch).diff(dim=1).flatten()
    of_first = torch.stack([a_over_b[0] - a_over_b[1], a_over_b[2] - a_over_b[3]]) / 2
    first_wins = torch.tensor([1.0, -1.0])
    losses = torch.nn.functional.softplus(-first_wins * of_first)
    torch.testing.assert_close(module.example_losses(batch), losses.repeat_interleave(2))
    assert not torch.allclose(ready(llama).example_losses(batch), losses.repeat_interleave(2))


def test_calibrated_letters(llama, tmp_path):
    """Logits of 2.65 nats for A and a tenth of content: the prior goes, and the rest is ten times as large."""
    plain, batch = ready(llama), both_orders(make_choice_batch(4))
    file = tmp_path / "letters.json"
    write_json(file, {"prior": -2.65, "temperature": 0.1})
    calibrated = ready(llama, letters=str(file))
    odds, found = (module.choice_logits(batch).diff(dim=1) for module in (plain, calibrated))
    torch.testing.assert_close(found, 10 * (odds + 2.65))
    for wrong in ("{}", '{"prior": NaN, "temperature": 1}', '{"prior": 0, "temperature": 0}'):
        file.write_text(wrong)
        with pytest.raises(ValueError, match="has no prior and temperature: write it by calibrate_letters"):
            SelectorModule(llama, letters=str(file))


def test_prior_and_temperature_by_hand(tmp_path):
    """Margins of 1, three right and one wrong: the likeliest T has sigmoid(1 / T) = 3 / 4."""
    orders = np.array([4, 5, 0, 1, 2, 3, 6, 7])
    log_odds = np.array([-3.0, -1.0, -1.0, -3.0, -1.0, -3.0, -3.0, -1.0])
    labels = np.array([0, 1, 1, 0, 1, 0, 1, 0])
    prior, temperature = calibrate_letters(orders, log_odds, labels)
    assert prior == -2.0
    assert temperature == pytest.approx(1 / math.log(3), rel=1e-3)
    # worse than chance
    assert calibrate_letters(orders, log_odds, 1 - labels)[1] == pytest.approx(100, rel=1e-3)
    with pytest.raises(ValueError, match="one is missing"):
        calibrate_letters(orders[:3], log_odds[:3], labels[:3])
    rows = [
        {"orders": int(order), "labels": int(label), "logp_a": 0.0, "logp_b": float(odds)}
        for order, odds, label in zip(orders, log_odds, labels, strict=True)
    ]
    done = steps.calibrate_letters(write_rows(tmp_path / "votes.jsonl", rows), str(tmp_path / "letters.json"))
    assert done == {"metrics": {"letters/prior": prior, "letters/temperature": temperature}}
    assert read_letters(str(tmp_path / "letters.json")) == (prior, temperature)


@pytest.mark.parametrize("orders", [[0, 1, 2, 5], [0, 2, 1, 3], [0, 1, 2], None])
def test_an_order_alone_is_refused(llama, orders):
    batch = make_choice_batch(4 if orders is None else len(orders))
    if orders is not None:
        batch["orders"] = torch.tensor(orders)
    with pytest.raises(ValueError, match="twins_together=true in PreferenceDataModule and an even"):
        ready(llama, orders="both").example_losses(batch)


@pytest.fixture(scope="module")
def votes(tmp_path_factory):
    """Answers with other numbers of tokens in one order than in the other: ``t`` and ``he`` become one token."""
    rng = np.random.default_rng(0)
    words = ["he", "cat", "sat.", "mat:", "xyz"]
    rows = [
        {
            "prompt": "p",
            "response_a": " ".join(rng.choice(words, rng.integers(1, 6))),
            "response_b": " ".join(rng.choice(words, rng.integers(6, 9))),
            "choice": "ab"[rng.integers(2)],
            "client": f"c{number % 3}",
        }
        for number in range(60)
    ]
    return write_rows(tmp_path_factory.mktemp("votes") / "votes.jsonl", rows)


def make_data(votes, tokenizer, **more) -> PreferenceDataModule:
    template = "{prompt} t{response_a} x{response_b}: A or B:"
    settings = {"choice_template": template, "tokenizer": tokenizer, "max_tokens": 64, "seed": 3}
    return PreferenceDataModule(
        votes, **nested(PreferenceDataModule, test_source=votes, val_share=0.3, **{**settings, **more})
    )


def test_orders_stay_neighbours_in_every_set(votes, llama):
    data = make_data(votes, llama, twins_together=True, batch_size=8, eval_batch_size=6)
    data.setup("fit")
    data.setup("test")
    lengths = data.test_set.lengths.reshape(-1, 2)
    assert (lengths[:, 0] != lengths[:, 1]).any()  # sorted by their own lengths they would part
    for loader in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader()):
        for batch in loader:
            assert torch.equal(batch["orders"][::2] ^ 1, batch["orders"][1::2])
    every = torch.cat([batch["orders"] for batch in data.val_dataloader()])
    for positions in data.val_client_indices.values():
        assert torch.equal(every[positions][::2] ^ 1, every[positions][1::2])


@pytest.mark.usefixtures("any_text")
def test_training_and_test_by_both_orders(votes, llama, make_trainer):
    data = make_data(votes, llama, twins_together=True, batch_size=8, eval_batch_size=6)
    module = SelectorModule(llama, orders="both", lr=0.01, dtype="fp32")
    trainer = make_trainer(max_epochs=1, limit_train_batches=3)
    trainer.fit(module, data)
    [metrics] = make_trainer().test(module, data, verbose=False)
    losses = []
    module.eval()
    with torch.no_grad():
        for batch in data.test_dataloader():
            losses.append(module.example_losses(batch))
    assert metrics["test/loss"] == pytest.approx(torch.cat(losses).mean().item(), rel=1e-5)
    assert math.isfinite(trainer.callback_metrics["val/loss"].item())


@pytest.mark.usefixtures("any_text")
@pytest.mark.parametrize(
    ("settings", "validated"), [({}, 0), ({"twins_together": True, "eval_batch_size": 5}, 1.0)]
)
def test_votes_that_are_apart_are_refused_in_training(votes, llama, make_trainer, settings, validated):
    data = make_data(votes, llama, batch_size=8, **settings)
    module = SelectorModule(llama, orders="both")
    with pytest.raises(ValueError, match=r"set twins_together=true .* and an even eval_batch_size"):
        make_trainer(max_epochs=1, limit_val_batches=validated, num_sanity_val_steps=0).fit(module, data)
    assert module.network is None  # before the base is loaded


@pytest.mark.slow
@pytest.mark.usefixtures("any_text")
def test_clients_side_by_side_train_the_same(votes, llama, make_trainer, tmp_path):
    """The order of a client's votes stays together where several clients share a batch."""
    from fedlight.callbacks.loop.federated_loop import FederatedLoop
    from fedlight.federation.algorithms.fedavg import FedAvg

    found = []
    for at_once in (1, 3):
        data = make_data(votes, llama, twins_together=True, batch_size=4)
        module = SelectorModule(llama, orders="both", lr=0.01, dtype="fp32", lora=Lora(dropout=0.0))
        loop = FederatedLoop(FedAvg(), clients_per_round=3, local_steps=2, clients_at_once=at_once)
        make_trainer(max_epochs=1, limit_val_batches=0, callbacks=[loop]).fit(module, data)
        found.append(
            {name: part.detach().clone() for name, part in module.named_parameters() if part.requires_grad}
        )
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)
