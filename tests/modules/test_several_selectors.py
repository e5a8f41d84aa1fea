from pathlib import Path

import lightning
import pytest
import torch
from one_weight import Outputs
from plain_lightning import trainer
from text_batches import make_choice_batch
from tiny_world import read_lines, write_rows
from tuned import tuned

from fedlight.callbacks.export.prediction_writer import PredictionWriter
from fedlight.datamodules.preferences.completions import CompletionPairDataModule
from fedlight.datamodules.preferences.format import Format
from fedlight.modules.functional import choice_loss
from fedlight.modules.selector import SelectorModule
from fedlight.recipes import steps


def settled(model: str, num_adapters: int, **settings) -> SelectorModule:
    """Adapters that differ, as after training."""
    return tuned(SelectorModule(model, num_adapters=num_adapters, **settings), 0.3).eval()


def outputs_of(trainer, module, loader) -> tuple[dict, dict]:
    """What test_step gave for the one batch, and the metrics."""
    outputs = Outputs()
    trainer.callbacks.append(outputs)
    [metrics] = trainer.test(module, loader, verbose=False)
    return outputs.seen[0], metrics


def test_each_adapter_is_asked_and_the_active_one_stays(llama):
    module, batch = settled(llama, 3), make_choice_batch()
    module.use_adapter("adapter1")
    found = module.ensemble_logits(batch)
    assert found.shape == (3, 3, 2)
    assert module.network.active_adapter == "adapter1"
    assert torch.equal(module.choice_logits(batch), found[:, 1])
    for index, name in enumerate(module.adapter_names):
        module.use_adapter(name)
        assert torch.equal(module.choice_logits(batch), found[:, index])
    assert not torch.equal(found[:, 0], found[:, 1])
    assert all(weight.requires_grad for name, weight in module.named_parameters() if "lora_" in name)


def test_an_error_leaves_the_active_adapter(llama):
    module = settled(llama, 3)
    module.use_adapter("adapter1")
    with pytest.raises(KeyError):
        module.ensemble_logits({})
    assert module.network.active_adapter == "adapter1"


def test_asking_all_keeps_the_gradients_of_the_active_one(llama):
    module, batch = settled(llama, 3), make_choice_batch()
    module.use_adapter("adapter2")
    module.example_losses(batch).sum().backward()
    with torch.no_grad():
        module.ensemble_logits(batch)
    graded = {name for name, weight in module.named_parameters() if weight.grad is not None}
    assert graded == {name for name in module.state_dict() if "adapter2" in name.split(".")}


def test_the_majority_is_what_accuracy_means(llama, make_trainer, loader):
    module, batch = settled(llama, 3), make_choice_batch(batch=8)
    logits, labels = module.ensemble_logits(batch).detach(), batch["labels"]
    found, metrics = outputs_of(make_trainer(), module, loader([batch]))
    right = logits.argmax(dim=2) == labels[:, None]
    assert len({tuple(row) for row in right.tolist()}) > 2  # they do not all agree
    assert torch.equal(found["correct"], right)
    assert torch.equal(found["vote"], right.sum(dim=1) >= 2)
    assert metrics["test/accuracy"] == found["vote"].float().mean()
    for index in range(3):
        assert metrics[f"test/accuracy_adapter{index}"] == right[:, index].float().mean()
    losses = torch.stack([choice_loss(logits[:, index], labels) for index in range(3)])
    assert metrics["test/loss"] == pytest.approx(losses.mean().item(), rel=1e-6)


def test_one_adapter_is_evaluated_as_it_was(llama, make_trainer, loader):
    """And over batches of unlike sizes each example counts alike."""
    module, batch = settled(llama, 1), make_choice_batch(batch=8)
    other = make_choice_batch(batch=1, seed=1)
    logits, more = (module.choice_logits(one).detach() for one in (batch, other))
    right, last = (each.argmax(dim=1) == one["labels"] for each, one in ((logits, batch), (more, other)))
    found, metrics = outputs_of(make_trainer(), module, loader([batch, other]))
    losses = torch.cat([choice_loss(logits, batch["labels"]), choice_loss(more, other["labels"])])
    expected = {"test/loss": losses.mean().item(), "test/accuracy": (right.sum() + last.sum()).item() / 9}
    assert metrics == pytest.approx(expected, rel=1e-6)
    assert torch.equal(found["correct"], right[:, None])
    assert torch.equal(found["vote"], right)
    [predicted] = make_trainer().predict(module, loader([batch]))
    assert torch.equal(predicted, logits.log_softmax(dim=1))


def test_an_even_number_of_selectors_is_evaluated_without_a_vote(llama, make_trainer, loader):
    module, batch = settled(llama, 2), make_choice_batch(batch=8)
    right = module.ensemble_logits(batch).argmax(dim=2) == batch["labels"][:, None]
    found, metrics = outputs_of(make_trainer(), module, loader([batch]))
    assert found.keys() == {"correct", "log_odds"}
    assert torch.equal(found["correct"], right)
    log_probs = module.ensemble_logits(batch).log_softmax(dim=2)
    of_right = log_probs[torch.arange(8), :, batch["labels"]]
    torch.testing.assert_close(found["log_odds"].sigmoid(), of_right.exp())
    assert metrics.keys() == {"test/loss", "test/accuracy_adapter0", "test/accuracy_adapter1"}
    assert metrics["test/accuracy_adapter1"] == right[:, 1].float().mean()


def vote(
    model: str, adapter: Path, source: str, orders: str, folder: Path, dies_at: int | None = None
) -> str:
    """Has the adapters of a folder judge all pairs of completions; raises at a batch on demand."""

    class Dies(lightning.Callback):
        def on_predict_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
            if batch_idx == dies_at:
                raise KeyError("killed")

    path = folder / f"{adapter.name}-{orders}.jsonl"
    data = CompletionPairDataModule(
        source, orders=orders, format=Format(choice_template="toy_choice"), tokenizer=model, eval_batch_size=4
    )
    writer = PredictionWriter(str(path), ["logp_a", "logp_b"], ["index", "order"])
    module = SelectorModule(model, adapter=str(adapter))
    trainer(1, [Dies(), writer]).predict(module, datamodule=data, return_predictions=False)
    return str(path)


@pytest.mark.parametrize("orders", ["one", "both"])
def test_three_adapters_in_one_run_label_as_three_runs_of_one(tiny_model, tmp_path, orders):
    settled(tiny_model, 3).save_adapter(tmp_path / "selectors")
    answers = ["anna paints walls .", "ben bakes bread .", "anna bakes walls .", "bread walls ."]
    rows = [{"fields": {"prompt": prompt}, "completions": answers} for prompt in answers[:2]]
    source = write_rows(tmp_path / "completions.jsonl", rows)
    together = vote(tiny_model, tmp_path / "selectors", source, orders, tmp_path)
    folders = [tmp_path / f"selectors/adapter{number}" for number in range(3)]
    apart = [vote(tiny_model, folder, source, orders, tmp_path) for folder in folders]
    outputs = tmp_path / "together.jsonl", tmp_path / "apart.jsonl"
    done = [
        steps.label_with_selectors(source, votes, str(output), orders)
        for votes, output in zip(([together], apart), outputs, strict=True)
    ]
    assert outputs[0].read_bytes() == outputs[1].read_bytes()
    assert done[0] == done[1]
    labelled = read_lines(outputs[0])
    assert len(labelled) == 12
    assert {min(row["votes_a"], row["votes_b"]) for row in labelled} == {0, 1}  # sometimes two against one

    (tmp_path / "again").mkdir()
    with pytest.raises(KeyError, match="killed"):
        vote(tiny_model, tmp_path / "selectors", source, orders, tmp_path / "again", dies_at=2)
    resumed = vote(tiny_model, tmp_path / "selectors", source, orders, tmp_path / "again")
    assert Path(resumed).read_bytes() == Path(together).read_bytes()
