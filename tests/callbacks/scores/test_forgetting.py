import math

import lightning as L
import pytest
import torch
from plain_lightning import trainer as make_trainer
from refusals import refusal
from torch.utils.data import DataLoader

from fedlight.callbacks.scores.forgetting import QUESTIONS, TEXTS, Forgetting, measure
from fedlight.evaluation.tasks.model import Likelihood
from fedlight.modules.reward import RewardModule
from fedlight.modules.sft import SFTModule


class Forgets:
    """Raw, it knows all; tuned, it takes the second choice of the first question, and each text costs twice as much."""

    def log_likelihoods(self, prompts, continuations, raw):
        if not any(prompts):
            return [[Likelihood(math.log(1 / 8) if raw else math.log(1 / 64), 1, False)] for _ in prompts]
        return [
            [
                Likelihood(-1.0 if place == (not raw and prompt == QUESTIONS[0].prompt) else -2.0, 1, False)
                for place, _ in enumerate(own)
            ]
            for prompt, own in zip(prompts, continuations, strict=True)
        ]


def test_raw_beside_tuned():
    expected = {"perplexity": 64, "perplexity_raw": 8, "knowledge": 39 / 40, "knowledge_raw": 1}
    assert measure(Forgets()) == pytest.approx({f"forgetting/{name}": n for name, n in expected.items()})


def test_every_question_has_four_choices_and_one_form():
    assert len(QUESTIONS) == 40
    assert len({question.prompt for question in QUESTIONS}) == 40
    assert all(len(set(question.choices)) == 4 for question in QUESTIONS)
    assert len(TEXTS) == 8


IDS = torch.tensor([[1, 5, 6, 2]])
BATCHES = DataLoader(
    [{"input_ids": IDS, "attention_mask": torch.ones_like(IDS), "labels": IDS}], batch_size=None
)


def test_a_test_logs_both_and_a_fresh_adapter_has_lost_nothing(tiny_model, tmp_path):
    module, trainer = SFTModule(tiny_model), make_trainer(1, [Forgetting()], default_root_dir=tmp_path)
    [found] = trainer.test(module, BATCHES, verbose=False)
    assert found["forgetting/perplexity"] == found["forgetting/perplexity_raw"] > 1
    assert found["forgetting/knowledge"] == found["forgetting/knowledge_raw"]
    with torch.no_grad():
        for weight in module.state_dict().values():
            weight += 0.3
    assert measure(module)["forgetting/perplexity"] != found["forgetting/perplexity"]
    assert measure(module)["forgetting/perplexity_raw"] == pytest.approx(found["forgetting/perplexity_raw"])


def test_training_logs_both(tiny_model, tmp_path):
    trainer = make_trainer(1, [Forgetting()], default_root_dir=tmp_path)
    trainer.fit(SFTModule(tiny_model, lr=0.1), BATCHES, BATCHES)
    found = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert found["forgetting/perplexity"] != found["forgetting/perplexity_raw"]


def test_a_module_without_likelihoods_is_refused_before_any_work(tmp_path):
    with refusal(r"Forgetting needs a module with log_likelihoods.* not LightningModule"):
        Forgetting().setup(make_trainer(1, default_root_dir=tmp_path), L.LightningModule(), "fit")
    with refusal(r"Forgetting needs a module with log_likelihoods.* not RewardModule"):
        Forgetting().setup(make_trainer(1, default_root_dir=tmp_path), RewardModule("toy"), "fit")
