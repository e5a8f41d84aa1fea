import pytest
import torch
from adapted import ready
from text_batches import make_sft_batch

from fedlight.devices.cost import CostMeter
from fedlight.devices.shape import BatchShape
from fedlight.modules.language import readout
from fedlight.modules.language.adapters import Lora
from fedlight.modules.sft import SFTModule


@pytest.fixture
def watched(llama):
    """A module, and the shapes of what its head has seen."""
    module, shapes = ready(SFTModule(llama)), []
    module.causal_lm.lm_head.register_forward_hook(
        lambda _, inputs, __: shapes.append(tuple(inputs[0].shape))
    )
    return module, shapes


def test_losses_equal_full_logits(llama):
    module, batch = ready(SFTModule(llama)).eval(), make_sft_batch(batch=4)
    found = module.example_losses(batch)
    for row in range(4):
        length = int(batch["attention_mask"][row].sum())
        ids = batch["input_ids"][row, :length]
        log_probs = module.network(input_ids=ids[None]).logits[0].double().log_softmax(dim=1)
        expected = -sum(log_probs[t - 1, ids[t]] for t in range(3, length)) / (length - 3)
        torch.testing.assert_close(found[row].double(), expected, rtol=1e-5, atol=0)


def test_the_head_is_computed_at_labelled_positions_only(watched):
    module, shapes = watched
    module.example_losses(make_sft_batch())
    assert shapes == [(6 + 5 + 4, 32)]


@pytest.fixture
def few_logits(monkeypatch):
    """Two positions of the vocabulary of 320 at once."""
    monkeypatch.setattr(readout, "MOST_LOGITS", 2 * 320)


def gradients(module, batch):
    losses = module.example_losses(batch)
    losses.mean().backward()
    return losses.detach(), [weight.grad for weight in module.parameters() if weight.grad is not None]


@pytest.mark.parametrize("trains_head", [False, True])
def test_logits_in_parts_give_the_same_losses_and_gradients(llama, monkeypatch, trains_head):
    batch, results = make_sft_batch(batch=4), []
    for most in (2**24, 2 * 320):
        monkeypatch.setattr(readout, "MOST_LOGITS", most)
        module = ready(SFTModule(llama, lora=Lora(dropout=0.0)))
        module.causal_lm.lm_head.requires_grad_(trains_head)
        with torch.no_grad():
            for name, weight in module.named_parameters():  # else the gradient of A is 0
                weight.copy_(weight if "lora_B" not in name else torch.full_like(weight, 0.1))
        results.append(gradients(module, batch))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


def test_a_frozen_head_never_sees_more_than_the_most_positions(watched, few_logits):
    module, shapes = watched
    gradients(module, make_sft_batch())
    module.eval()
    for without_graph in (torch.no_grad, torch.inference_mode):
        with without_graph():
            assert not module.example_losses(make_sft_batch()).requires_grad
    assert shapes == 3 * [*7 * [(2, 32)], (1, 32)]


def test_no_part_is_much_smaller_than_another(watched, monkeypatch):
    """A product with one position has other bits where the weights lie elsewhere in memory."""
    monkeypatch.setattr(readout, "MOST_LOGITS", 7 * 320)
    module, shapes = watched
    gradients(module, make_sft_batch())
    assert shapes == 3 * [(5, 32)]


def test_in_fp16_the_loss_scale_reaches_all_logits(watched, few_logits):
    module, shapes = watched
    with torch.autocast("cpu", dtype=torch.float16):
        module.example_losses(make_sft_batch())
    assert shapes == [(15, 32)]


def test_a_step_in_parts_counts_the_same_operations_and_less_memory(llama, monkeypatch):
    costs = []
    for most in (2**24, 4 * 320):
        monkeypatch.setattr(readout, "MOST_LOGITS", most)
        monkeypatch.setattr("fedlight.devices.cost.COUNTED", {})  # of the other constant
        costs.append(CostMeter(SFTModule(llama)).cost(BatchShape(examples=8, tokens=16, responses=120)))
    assert costs[0].flops == costs[1].flops
    # At the peak of the backward pass, what is left of 120 x 320 logits is a row of 32 numbers per position.
    assert costs[1].activation_bytes < costs[0].activation_bytes - 120 * 320 * 4
