import math

import adapted
import pytest
import torch
from one_weight import Outputs
from text_batches import make_pair_batch, make_sft_batch
from torch.nn.functional import pad
from tuned import tuned

from fedlight.devices.quantization import QuantizedBase
from fedlight.modules.dpo import DPOModule
from fedlight.modules.language.adapters import Lora
from fedlight.modules.language.optimizers import Optimization
from fedlight.modules.sft import SFTModule


def ready(*args, **kwargs) -> DPOModule:
    return adapted.ready(DPOModule(*args, **kwargs)).eval()


def log_prob_written_out(network, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Log-probability of one unpadded response: full logits, one token after the other."""
    scores = network(input_ids=ids[None]).logits[0].double()
    total = torch.zeros((), dtype=torch.float64)
    for t in range(1, len(ids)):
        if labels[t] != -100:
            total = total + scores[t - 1, ids[t]] - torch.log(torch.exp(scores[t - 1]).sum())
    return total


def losses_written_out(module: DPOModule, batch: dict, beta: float) -> torch.Tensor:
    """Equation 7, pair by pair and side by side, without padding, cache or a joint pass."""
    losses = []
    for row in range(len(batch["index"])):
        score = {}
        for side in ("chosen", "rejected"):
            length = int(batch[side]["attention_mask"][row].sum())
            text = batch[side]["input_ids"][row, :length], batch[side]["labels"][row, :length]
            score[side] = log_prob_written_out(module.network, *text)
            with torch.no_grad(), module.network.disable_adapter():
                score[f"reference {side}"] = log_prob_written_out(module.network, *text)
        ratio = (
            score["chosen"] - score["reference chosen"] - (score["rejected"] - score["reference rejected"])
        )
        losses.append(-torch.log(1 / (1 + torch.exp(-beta * ratio))))
    return torch.stack(losses)


def test_values_and_gradients_equal_an_independent_implementation(llama):
    batch, beta = make_pair_batch(), 0.5
    ours, reference = tuned(ready(llama, beta=beta)), tuned(ready(llama, beta=beta))
    losses, expected = ours.example_losses(batch), losses_written_out(reference, batch, beta)
    assert (losses - math.log(2)).abs().min() > 0.01
    torch.testing.assert_close(losses.double(), expected, rtol=1e-4, atol=1e-5)

    losses.mean().backward()
    expected.mean().backward()
    gradients = {name: weight.grad for name, weight in reference.named_parameters() if weight.requires_grad}
    assert len(gradients) == 28
    for name, weight in ours.named_parameters():
        if weight.requires_grad:
            assert weight.grad.abs().max() > 0
            torch.testing.assert_close(weight.grad, gradients[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("base", ["plain", "int8", "nf4"])
def test_the_first_loss_is_log_2(llama, base):
    metrics = ready(llama, base=base).example_metrics(make_pair_batch())
    torch.testing.assert_close(metrics["loss"], torch.full((3,), math.log(2)), rtol=0, atol=1e-6)
    assert metrics["reward_margin"].abs().max() < 1e-5


def test_it_trains_in_double_precision(llama, make_trainer, loader):
    """Where tensors without a type are fp64, and the model's log-probabilities are not."""
    module = DPOModule(llama, dtype="fp32", optimizer=Optimization(name="SGD"), lr=0.1)
    trainer = make_trainer(max_epochs=1, precision="64-true")
    trainer.fit(module, loader([make_pair_batch(2)]))
    assert trainer.callback_metrics["train/loss"].item() == pytest.approx(math.log(2), abs=1e-6)


def test_the_reference_is_computed_once_per_pair(llama, make_trainer, loader):
    module, passes = ready(llama, lr=1e-3, lora=Lora(dropout=0.5)).train(), []
    # 3 + 3 rows of 9 tokens per pass; eval mode and no gradient tell the reference's passes.
    module.causal_lm.model.register_forward_hook(
        lambda part, _, output: passes.append((part.training, output.last_hidden_state.requires_grad))
    )
    batches = [make_pair_batch(seed=0), make_pair_batch(seed=1)]
    make_trainer(max_epochs=3).fit(module, loader(batches))
    assert passes.count((False, False)) == 2
    assert passes.count((True, True)) == 6
    assert len(module._reference) == 6


def test_each_precision_of_the_base_has_its_own_reference(llama):
    """As one device after the other has it, and the server again."""
    module, batch = tuned(ready(llama)), make_pair_batch()
    base, passes, found = QuantizedBase(module), [], {}
    module.causal_lm.model.register_forward_hook(lambda *_: passes.append(module.base_bits))
    for bits in (4, 16, 8, 4, 16, 8):
        base.use(bits)
        module.base_bits = bits
        reference = module.reference_log_probs(batch)
        assert torch.equal(reference, found.setdefault(bits, reference))
        assert torch.equal(reference, module.reference_pass(batch))
    assert passes == [4, 4, 16, 16, 8, 8, 4, 16, 8]  # the second one of each is remembered
    assert (found[16] - found[8]).abs().max() > 1e-4 < (found[16] - found[4]).abs().max()
    checkpoint = {}
    module.on_save_checkpoint(checkpoint)
    resumed = ready(llama)
    resumed.on_load_checkpoint(checkpoint)
    del passes[:]
    for resumed.base_bits, reference in found.items():
        assert torch.equal(resumed.reference_log_probs(batch), reference)


def test_training_takes_the_reference_of_a_pairs_own_first_batch(llama, monkeypatch):
    """So that its bits depend neither on what was evaluated before, in which process, nor on who else has the pair."""
    module, batch, passes = ready(llama), make_pair_batch(), []
    compute = module.reference_pass
    monkeypatch.setattr(module, "reference_pass", lambda pairs: passes.append(pairs) or compute(pairs))
    for _ in range(2):
        module.eval()
        module.evaluation(batch)
        module.example_losses(batch)
        module.train()
        module.example_metrics(batch)
        module.example_losses(batch)
        module.example_losses({**batch, "index": batch["index"] + 3})
    assert len(passes) == 3


@pytest.mark.parametrize(("base", "bits"), [("plain", 16), ("int8", 8), ("nf4", 4)])
def test_at_first_the_precision_is_that_of_the_base(base, bits):
    assert DPOModule("x", base=base).base_bits == bits


def test_a_pair_is_known_by_its_tokens_however_it_is_padded(llama):
    module, batch = ready(llama), make_pair_batch()
    first = module.reference_log_probs(batch)
    fillers, wider = {"labels": -100}, {"index": batch["index"]}
    for side in ("chosen", "rejected"):
        padded = {n: pad(part, (0, 2), value=fillers.get(n, 0)) for n, part in batch[side].items()}
        wider[side] = padded
    assert torch.equal(module.reference_log_probs(wider), first)
    assert len(module._reference) == 3
    other = make_pair_batch(seed=5)
    assert not torch.equal(module.reference_log_probs(other), first)
    assert torch.equal(module.reference_log_probs(batch), first)


def test_a_checkpoint_of_another_kind_is_refused(llama, make_trainer, loader, tmp_path):
    trainer = make_trainer(max_epochs=1)
    trainer.fit(SFTModule(llama), loader([make_sft_batch()]))
    trainer.save_checkpoint(tmp_path / "sft.ckpt")
    with pytest.raises(ValueError, match="was not made by a DPOModule: save its adapter"):
        DPOModule.load_from_checkpoint(tmp_path / "sft.ckpt")


def test_a_merged_adapter_is_the_reference(llama, make_trainer, loader, tmp_path):
    tuned = SFTModule(llama, lr=1e-2)
    make_trainer().fit(tuned, loader([make_sft_batch()]))
    tuned.save_adapter(tmp_path / "sft")
    module, batch = ready(llama, adapter=str(tmp_path / "sft"), merge_adapter=True), make_pair_batch()
    torch.testing.assert_close(module.example_losses(batch), torch.full((3,), math.log(2)), rtol=0, atol=1e-6)
    assert not torch.allclose(module.reference_log_probs(batch), ready(llama).reference_log_probs(batch))


def test_evaluation_says_which_pairs_were_right(llama, make_trainer, loader):
    module, batch, outputs = tuned(ready(llama)), make_pair_batch(batch=8), Outputs()
    [logged] = make_trainer(callbacks=[outputs]).validate(module, loader([batch]), verbose=False)
    right = module.example_metrics(batch)["reward_margin"] > 0
    assert 0 < right.sum() < 8
    [given] = outputs.seen
    assert given["correct"].tolist() == right[:, None].tolist()
    assert given["vote"].tolist() == right.tolist()
    assert logged.keys() == {"val/loss", "val/reward_margin", "val/reward_accuracy"}
    assert logged["val/reward_accuracy"] == right.float().mean()


def test_defaults_are_the_papers():
    given = DPOModule("x").hparams
    assert (given.beta, given.lr, given.optimizer["name"]) == (0.1, 1e-6, "RMSprop")
    with pytest.raises(ValueError, match="beta=0 must be in"):
        DPOModule("x", beta=0)
