import math

import adapted
import pytest
import torch
from one_weight import Outputs
from peft import PeftModel
from text_batches import make_pair_batch
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from fedlight.modules.reward import RewardModule

HEAD = "network.base_model.model.score.modules_to_save.default.weight"


def ready(*args, **kwargs) -> RewardModule:
    return adapted.ready(RewardModule(*args, **kwargs)).eval()


@pytest.fixture
def rewards_by_hand(monkeypatch):
    """Rewards 2, 0, 1 of the chosen and 1, 3, 1 of the rejected responses."""
    monkeypatch.setattr(RewardModule, "rewards", lambda *_: torch.tensor([2.0, 0, 1, 1, 3, 1]))


def test_loss_and_accuracy_by_hand(llama, rewards_by_hand):
    metrics = RewardModule(llama).example_metrics(make_pair_batch())
    expected = [math.log(1 + math.exp(-margin)) for margin in (1, -3, 0)]
    assert metrics["loss"].tolist() == pytest.approx(expected, rel=1e-6)
    assert metrics["accuracy"].tolist() == [1, 0, 0.5]


def test_evaluation_logs_means_and_says_who_was_right(llama, rewards_by_hand, make_trainer, loader):
    module, outputs = ready(llama), Outputs()
    [metrics] = make_trainer(callbacks=[outputs]).test(module, loader([make_pair_batch()]), verbose=False)
    assert metrics["test/accuracy"] == 0.5
    assert metrics["test/loss"] == pytest.approx((0.313262 + 3.048587 + 0.693147) / 3, abs=1e-5)
    assert outputs.seen[0]["correct"].tolist() == [[True], [False], [False]]
    assert outputs.seen[0]["vote"].tolist() == [True, False, False]


def test_a_reward_is_the_head_on_the_last_token(llama):
    module, text = ready(llama), make_pair_batch()["rejected"]
    found = module.rewards(text)
    head = module.state_dict()[HEAD]
    for row, length in enumerate(text["attention_mask"].sum(dim=1).tolist()):
        states = module.causal_lm.model(input_ids=text["input_ids"][row : row + 1, :length]).last_hidden_state
        torch.testing.assert_close(found[row], head[0] @ states[0, -1])


def test_the_end_counts_also_where_it_is_the_padding_token(llama, tmp_path):
    network = AutoModelForCausalLM.from_pretrained(llama)
    network.config.pad_token_id = network.config.eos_token_id
    network.save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(llama)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(tmp_path)
    module, text = ready(str(tmp_path)), make_pair_batch()["chosen"]
    ended = text["input_ids"].clone()
    ended[0, -1] = tokenizer.eos_token_id
    found, without = module.rewards({**text, "input_ids": ended}), module.rewards(text)
    assert (found != without).tolist() == [True, False, False]


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_padding_does_not_change_rewards(request, kind):
    module, batch = ready(request.getfixturevalue(kind)), make_pair_batch()
    found = module.pair_rewards(batch)
    chosen = {n: pad(part, (0, 4), value=9 * (n == "input_ids")) for n, part in batch["chosen"].items()}
    wider = {**batch, "chosen": chosen}
    torch.testing.assert_close(found, module.pair_rewards(wider))
    for side, column in (("chosen", 0), ("rejected", 1)):
        torch.testing.assert_close(found[:, column], module.rewards(batch[side]))


def test_swapped_roles_mirror_the_prediction(llama, make_trainer, loader):
    module, batch = ready(llama), make_pair_batch()
    swapped = {**batch, "chosen": batch["rejected"], "rejected": batch["chosen"]}
    one, other = make_trainer().predict(module, loader([batch, swapped]))
    torch.testing.assert_close(one, other.flip(1))
    torch.testing.assert_close(one.exp().sum(dim=1), torch.ones(3))
    torch.testing.assert_close(-one[:, 0], module.example_losses(batch).detach())


def test_peft_alone_reads_the_folder(llama, tmp_path):
    module, text = ready(llama, seed=4), make_pair_batch()["chosen"]
    module.save_adapter(tmp_path)
    torch.manual_seed(77)
    base = AutoModelForSequenceClassification.from_pretrained(llama, num_labels=1)
    loaded = PeftModel.from_pretrained(base, tmp_path).eval()
    logits = loaded(input_ids=text["input_ids"], attention_mask=text["attention_mask"]).logits
    torch.testing.assert_close(logits[:, 0], module.rewards(text))


def test_its_head_trains_in_double_precision(llama, make_trainer, loader):
    single, double = (RewardModule(llama, dtype="fp32") for _ in range(2))
    for module, precision in ((single, "32-true"), (double, "64-true")):
        trainer = make_trainer(max_epochs=1, precision=precision)
        trainer.fit(module, loader([make_pair_batch(2)]))
        module.loss = trainer.callback_metrics["train/loss"].item()
    assert double.loss == pytest.approx(single.loss, rel=1e-6)


def test_it_does_not_generate(llama):
    with pytest.raises(ValueError, match="use an SFTModule"):
        ready(llama).generate(["the cat"])
