import math

import pytest
import torch

from fedlight.modules.functional import (
    choice_loss,
    dpo_loss,
    info_nce,
    reward_margin,
    sft_loss,
    token_log_probs,
)


def test_token_log_probs_by_hand():
    logits = torch.tensor([[[0.0, math.log(3)], [math.log(4), 0.0]]])
    found = token_log_probs(logits, torch.tensor([[1, 1]]))
    torch.testing.assert_close(found, torch.tensor([[math.log(3 / 4), math.log(1 / 5)]]))


def test_token_log_probs_are_fp32_also_from_bf16():
    found = token_log_probs(torch.zeros(1, 3, dtype=torch.bfloat16), torch.tensor([2]))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.tensor([-math.log(3)]))


def test_sft_loss_of_an_example_without_response_is_zero():
    log_probs = torch.tensor([[-1.0, -3.0], [-5.0, -7.0]])
    scored = torch.tensor([[True, True], [False, False]])
    assert sft_loss(log_probs, scored).tolist() == [2.0, 0.0]


def test_choice_loss_of_swapped_roles_is_the_same():
    logits = torch.tensor([[1.0, -0.5], [0.2, 3.0]])
    labels = torch.tensor([0, 0])
    torch.testing.assert_close(choice_loss(logits, labels), choice_loss(logits.flip(1), 1 - labels))
    torch.testing.assert_close(choice_loss(logits, labels)[0].item(), math.log(1 + math.exp(-1.5)))


def test_dpo_loss_and_gradient_equal_the_paper():
    """Eq. 7 and the gradient under it: -beta * sigmoid(r_l - r_w), with opposite signs for chosen and rejected."""
    beta = 0.3
    chosen, rejected = (torch.tensor(x, requires_grad=True) for x in ([-3.0, -8.0], [-4.0, -2.0]))
    reference_chosen, reference_rejected = torch.tensor([-3.5, -6.0]), torch.tensor([-3.0, -2.5])
    losses = dpo_loss(reward_margin(chosen, rejected, reference_chosen, reference_rejected), beta)
    losses.sum().backward()

    for i in range(2):
        reward_chosen = beta * (chosen[i].item() - reference_chosen[i].item())
        reward_rejected = beta * (rejected[i].item() - reference_rejected[i].item())
        wrong = 1 / (1 + math.exp(-(reward_rejected - reward_chosen)))
        assert math.isclose(losses[i].item(), -math.log(1 - wrong), rel_tol=1e-5)
        assert math.isclose(chosen.grad[i].item(), -beta * wrong, rel_tol=1e-5)
        assert math.isclose(rejected.grad[i].item(), beta * wrong, rel_tol=1e-5)


def cosine(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True)) / math.hypot(*a) / math.hypot(*b)


@pytest.mark.parametrize("include_positive", [False, True])
def test_info_nce_equals_the_formula(include_positive):
    generator = torch.Generator().manual_seed(3)
    queries, targets = (3 * torch.randn(5, 4, generator=generator) for _ in range(2))
    found = info_nce(queries, targets, 0.5, include_positive)
    for i in range(5):
        similar = [cosine(queries[i].tolist(), target.tolist()) for target in targets]
        others = sum(math.exp(s / 0.5) for j, s in enumerate(similar) if include_positive or j != i)
        assert math.isclose(found[i].item(), -math.log(math.exp(similar[i] / 0.5) / others), rel_tol=1e-5)


def test_a_tiny_temperature_neither_overflows_nor_loses_its_gradient():
    queries = torch.tensor([[1.0, 0.0], [0.0, 1.0]], requires_grad=True)
    losses = info_nce(queries, torch.tensor([[-1.0, 0.1], [0.1, -1.0]]), temperature=1e-4)
    losses.sum().backward()
    assert losses.isfinite().all()
    assert queries.grad.isfinite().all()
    assert (queries.grad != 0).any()


def test_info_nce_of_half_precision_is_computed_in_fp32():
    queries = torch.tensor([[1.0, 0.5], [0.25, 1.0]])
    found = info_nce(queries.bfloat16(), queries.bfloat16(), 0.5)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, info_nce(queries, queries, 0.5))


def test_a_batch_of_one_has_nothing_to_compare_with():
    one = torch.ones(1, 3)
    with pytest.raises(ValueError, match=r"the batch has 1: set data\.batch_size to 2 or more, or"):
        info_nce(one, one, 0.5)
    assert info_nce(one, one, 0.5, include_positive=True).item() == pytest.approx(0, abs=1e-6)
