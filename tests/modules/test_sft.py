"""The response loss against the whole vocabulary at every position."""

import torch

from fedlight.modules.sft import SFTModule


def test_losses_equal_full_logits(llama, make_sft_batch):
    module = SFTModule(llama)
    module.configure_model()
    module.eval()
    batch = make_sft_batch(batch=4)
    found = module.example_losses(batch)
    for row in range(4):
        length = int(batch["attention_mask"][row].sum())
        ids = batch["input_ids"][row, :length]
        log_probs = module.network(input_ids=ids[None]).logits[0].double().log_softmax(dim=1)
        expected = -sum(log_probs[t - 1, ids[t]] for t in range(3, length)) / (length - 3)
        torch.testing.assert_close(found[row].double(), expected, rtol=1e-5, atol=0)


def test_the_head_is_computed_at_labelled_positions_only(llama, make_sft_batch):
    module = SFTModule(llama)
    module.configure_model()
    shapes = []
    module.causal_lm.lm_head.register_forward_hook(
        lambda _, inputs, __: shapes.append(tuple(inputs[0].shape))
    )
    batch = make_sft_batch()
    module.example_losses(batch)
    assert shapes == [(6 + 5 + 4, 32)]
