import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.checkpoint import checkpoint

from fedlight.stacking import StackedAdapters


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)
        self.drop, self.other = nn.Dropout(0.5), nn.Dropout(0.5)


def make_stack(rate=0.0):
    torch.manual_seed(0)
    lora = LoraConfig(r=2, target_modules=["first", "second"], lora_dropout=rate, init_lora_weights=False)
    model = get_peft_model(Net(), lora).train()
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    stack = StackedAdapters(model, trained)
    stack.enter([{}, {}], [None, None])
    stack.set_rows([3, 2], [1, 2])
    return model.get_base_model(), stack


def test_a_layer_that_is_called_twice_has_another_mask_and_the_same_in_the_same_step_again():
    net, stack = make_stack()
    ones = torch.ones(5, 64)
    masks = [net.drop(ones), net.drop(ones), net.other(ones)]
    assert all(not torch.equal(one, other) for one, other in zip(masks, [*masks[1:], masks[0]], strict=True))
    assert all(0.3 < float((mask == 0).float().mean()) < 0.7 for mask in masks)
    stack.set_rows([3, 2], [1, 2])
    assert torch.equal(net.drop(ones), masks[0])
    assert torch.equal(net.drop(ones), masks[1])


def test_a_result_that_is_changed_in_place_is_nobody_elses():
    net, _ = make_stack()
    ones = torch.ones(5, 64)
    net.drop(ones).add_(100)
    assert float(net.other(ones).max()) == 2


def test_a_layer_that_is_computed_again_has_its_mask_and_one_of_several_calls_is_refused():
    net, stack = make_stack()
    x = torch.ones(5, 64, requires_grad=True)
    masks = []

    def segment(h):
        masks.append(net.drop(h))
        return masks[-1] * h

    checkpoint(segment, x, use_reentrant=False).sum().backward()
    assert torch.equal(masks[0], masks[1])
    stack.set_rows([3, 2], [1, 2])
    total = checkpoint(segment, x, use_reentrant=False) + checkpoint(segment, x, use_reentrant=False)
    with pytest.raises(ValueError, match=r"drop drops several times in a step.* set clients_at_once to 1"):
        total.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_segment_that_begins_with_an_adapter_is_computed_again(reentrant):
    """Its input is the same object both times, so it still has what dropout made of it in the forward pass."""
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))

    def gradients(run):
        net, stack = make_stack(rate=0.4)
        run(net.second, torch.tanh(net.first(x))).sum().backward()
        found = {name: value.clone() for k in (0, 1) for name, value in stack.gradients(k).items()}
        stack.leave()
        return found

    alone = gradients(lambda layer, h: layer(h))
    again = gradients(lambda layer, h: checkpoint(layer, h, use_reentrant=reentrant))
    torch.testing.assert_close(again, alone, rtol=1e-6, atol=1e-7)
