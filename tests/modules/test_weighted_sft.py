import pytest
import torch
from text_batches import make_sft_batch
from tuned import tuned

from fedlight.callbacks.loop.fitted_step import FittedStep
from fedlight.modules.language.adapters import Lora
from fedlight.modules.sft import SFTModule

PROMPTS = ["the cat sat on", "a dog ran to the park: B day", "the cat sat on", "c"]
ANSWERS = [" the mat.", " after day", " a warm and soft one.", " A"]


@pytest.fixture
def module(llama):
    return tuned(SFTModule(llama, lora=Lora(dropout=0.0)), 0.05, parts=("lora_",))


def gradients(module, batch, micro_batch=None):
    fitted = FittedStep(module)
    fitted.enter(micro_batch, checkpointing=False)
    module.zero_grad()
    with pytest.warns(UserWarning, match="self.trainer"):
        loss = module.training_step(batch, 0)
    loss.backward()
    fitted.leave()
    return loss.detach(), {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}


def test_a_loss_counts_by_its_weight_and_the_mean_is_over_examples(module):
    batch = make_sft_batch(batch=4)
    plain = module.example_losses(batch)
    weights = torch.tensor([1.0, 0.0, 0.25, 1.0])
    weighted = module.example_losses({**batch, "weights": weights})
    torch.testing.assert_close(weighted, plain * torch.tensor([1, 0, 0.25, 1]), rtol=0, atol=0)
    loss, _ = gradients(module, {**batch, "weights": weights})
    torch.testing.assert_close(loss, (plain[0] + plain[2] / 4 + plain[3]).detach() / 4)


@pytest.mark.parametrize("micro_batch", [1, 3])
def test_micro_batches_keep_each_examples_weight(module, micro_batch):
    batch = {**make_sft_batch(batch=4), "weights": torch.tensor([0.1, 1.0, 0.5, 0.9])}
    loss, whole = gradients(module, batch)
    same, parts = gradients(module, batch, micro_batch)
    torch.testing.assert_close(same, loss)
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_energies_of_a_batch_equal_a_loop_over_tokens(module, temperature):
    found = module.free_energies(PROMPTS, ANSWERS, temperature)
    module.network.eval()
    for prompt, answer, energy in zip(PROMPTS, ANSWERS, found, strict=True):
        ids = module.tokenizer(prompt + answer)["input_ids"]
        start = len(module.tokenizer(prompt)["input_ids"])
        with torch.no_grad():
            logits = module.network(input_ids=torch.tensor([ids])).logits[0].double()
        terms = [
            -temperature * torch.log(torch.exp(logits[at - 1] / temperature).sum())
            for at in range(start, len(ids))
        ]
        assert energy == pytest.approx(float(sum(terms)) / len(terms), rel=1e-4)


def test_energies_are_of_the_model_as_it_stands_and_leave_it_alone(module):
    before, state = torch.get_rng_state(), module.network.training
    found = module.free_energies(PROMPTS, ANSWERS)
    assert torch.equal(before, torch.get_rng_state())
    assert module.network.training is state
    with torch.no_grad():
        for weight in module.state_dict().values():
            weight += 0.1
    assert module.free_energies(PROMPTS, ANSWERS) != found
    assert module.free_energies([], []) == []


def test_what_has_no_energy_is_refused(module):
    with pytest.raises(ValueError, match="the continuation '' of 'c' has no tokens"):
        module.free_energies(["c"], [""])
    with pytest.raises(ValueError, match=r"temperature=0.0 must be in \(0, inf\)"):
        module.free_energies(["c"], [" a"], temperature=0.0)
    with pytest.raises(ValueError, match="more than the model's 64: shorten the prompt"):
        module.free_energies(["the cat " * 70], [" A"])
