import pytest
import torch
from one_weight import Outputs
from plain_lightning import trainer as quiet
from torch.utils.data import DataLoader

from fedlight.federation.protocols import HoldsAdapters
from fedlight.modules.feature_selector import FeatureSelectorModule
from fedlight.modules.language.optimizers import Optimization


def batch(examples=5, dimension=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(examples, 2, dimension, generator=generator)
    return {"features": features, "labels": torch.randint(0, 2, (examples,), generator=generator)}


def test_loss_of_a_linear_head_is_bradley_terry_written_out():
    module, made = FeatureSelectorModule(dimension=6), batch()
    w = module.heads["default"].head.weight.detach()[0].double()
    better = made["features"][torch.arange(5), made["labels"]].double() @ w
    worse = made["features"][torch.arange(5), 1 - made["labels"]].double() @ w
    expected = torch.log1p(torch.exp(worse - better))
    torch.testing.assert_close(module.example_losses(made).double(), expected, rtol=1e-5, atol=1e-6)


def test_hidden_layer_written_out():
    module, made = FeatureSelectorModule(dimension=6, hidden=4), batch()
    head = module.heads["default"]
    u = (made["features"] @ head.body.weight.T + head.body.bias).tanh() @ head.head.weight[0]
    torch.testing.assert_close(module.choice_logits(made), u)
    names = ["heads.default.body.weight", "heads.default.body.bias", "heads.default.head.weight"]
    assert [name for name, _ in module.named_parameters()] == names


def test_heads_start_apart_and_the_active_one_alone_learns():
    module, made = FeatureSelectorModule(dimension=6, hidden=4, num_adapters=3), batch()
    assert isinstance(module, HoldsAdapters)
    assert module.adapter_names == ["adapter0", "adapter1", "adapter2"]
    losses = []
    for name in module.adapter_names:
        module.use_adapter(name)
        losses.append(module.example_losses(made))
    assert min((losses[i] - losses[j]).abs().max() for i, j in ((0, 1), (1, 2), (0, 2))) > 0.01
    module.example_losses(made).mean().backward()
    assert {name for name, p in module.named_parameters() if p.grad is not None} == {
        f"heads.adapter2.{rest}" for rest in ("body.weight", "body.bias", "head.weight")
    }
    module.use_adapter("adapter0")
    assert all(p.grad is None for p in module.parameters())
    with pytest.raises(ValueError, match="adapter='adapter3': did you mean"):
        module.use_adapter("adapter3")


def test_first_head_does_not_depend_on_their_number():
    one, three = FeatureSelectorModule(dimension=6, seed=4), FeatureSelectorModule(6, num_adapters=3, seed=4)
    assert torch.equal(one.heads["default"].head.weight, three.heads["adapter0"].head.weight)
    other = FeatureSelectorModule(dimension=6, seed=5)
    assert not torch.equal(one.heads["default"].head.weight, other.heads["default"].head.weight)


def test_evaluation_says_who_is_right_and_what_the_majority_says():
    module, made = FeatureSelectorModule(dimension=6, num_adapters=3), batch(40)
    outputs = Outputs()
    [metrics] = quiet(1, [outputs]).test(module, loader(made), verbose=False)
    weights = [head.head.weight[0] for head in module.heads.values()]
    right = torch.stack([((made["features"] @ w).argmax(dim=1) == made["labels"]) for w in weights], dim=1)
    assert torch.equal(torch.cat([one["correct"] for one in outputs.seen]), right)
    vote = right.sum(dim=1) >= 2
    assert torch.equal(torch.cat([one["vote"] for one in outputs.seen]), vote)
    assert metrics["test/accuracy"] == pytest.approx(vote.float().mean().item())
    assert metrics["test/accuracy_adapter1"] == pytest.approx(right[:, 1].float().mean().item())


def loader(made):
    rows = [
        {"features": x, "labels": y} for x, y in zip(made["features"], made["labels"].tolist(), strict=True)
    ]
    return DataLoader(rows, batch_size=8)


def test_plain_training_reaches_logistic_regression(tmp_path):
    """Newton's method on the differences is the reference."""
    made = batch(60, 3)
    truth = torch.tensor([1.0, -2.0, 0.5])
    noise = torch.randn(60, generator=torch.Generator().manual_seed(1))
    made["labels"] = ((made["features"] @ truth).diff(dim=1)[:, 0] + 2 * noise > 0).long()
    d = made["features"].diff(dim=1)[:, 0].double()
    y, w = made["labels"].double(), torch.zeros(3, dtype=torch.float64)
    for _ in range(30):
        p = torch.sigmoid(d @ w)
        w += torch.linalg.solve(d.T @ (d * (p * (1 - p))[:, None]), d.T @ (y - p))
    module = FeatureSelectorModule(dimension=3, lr=0.2, optimizer=Optimization(name="Adam"))
    rows = [{"features": x, "labels": t} for x, t in zip(made["features"], made["labels"], strict=True)]
    quiet(250, log_every_n_steps=1000).fit(module, DataLoader(rows, batch_size=60), loader(batch(4, 3)))
    found = module.heads["default"].head.weight[0].double()
    torch.testing.assert_close(found.detach(), w, rtol=0, atol=1e-3)
    module.save_adapter(tmp_path / "heads")
    again = FeatureSelectorModule(dimension=3, adapter=str(tmp_path / "heads"))
    assert torch.equal(again.heads["default"].head.weight, module.heads["default"].head.weight)


def test_other_heads_and_damaged_files_are_refused(tmp_path):
    folder = str(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"has no heads\.safetensors: give a folder"):
        FeatureSelectorModule(dimension=3, adapter=folder)
    FeatureSelectorModule(dimension=3, hidden=2).save_adapter(folder)
    with pytest.raises(ValueError, match=r"has heads default.body.bias \(2,\).*set dimension"):
        FeatureSelectorModule(dimension=3, adapter=folder)
    (tmp_path / "heads.safetensors").write_bytes(b"no")
    with pytest.raises(ValueError, match=r"heads\.safetensors is damaged"):
        FeatureSelectorModule(dimension=3, hidden=2, adapter=folder)


def test_other_features_are_refused_with_the_setting():
    module = FeatureSelectorModule(dimension=5)
    with pytest.raises(ValueError, match=r"model.dimension=5.*have 6 numbers: set model.dimension=6"):
        quiet(1).fit(module, loader(batch()), loader(batch()))
    with pytest.raises(ValueError, match=r"reads features of two texts.*have no 'features'"):
        quiet(1).test(module, DataLoader([{"labels": 1}]), verbose=False)
    for losses in (
        module.example_losses,
        lambda batch: module.training_step(batch, 0),
    ):  # as devices and groups call it
        with pytest.raises(ValueError, match=r"model.dimension=5.*have 6 numbers"):
            losses(batch())


@pytest.mark.parametrize(("name", "value"), [("num_adapters", 0), ("hidden", -1), ("lr", 0)])
def test_settings_out_of_range(name, value):
    with pytest.raises(ValueError, match=f"{name}={value}"):
        FeatureSelectorModule(**{name: value})
