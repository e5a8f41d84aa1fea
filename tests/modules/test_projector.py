import numpy as np
import pytest
import torch
from plain_lightning import trainer
from torch.utils.data import DataLoader, TensorDataset

from fedlight.evaluation.alignment import alignment, unit
from fedlight.modules.functional import info_nce
from fedlight.modules.projector import ProjectorModule

SMALL, LARGE = 6, 10


def vectors(number, seed):
    """Of a small encoder, and what a fixed map that is not linear makes of them."""
    small = unit(np.random.default_rng(seed).normal(size=(number, SMALL)))
    weights = np.random.default_rng(99).normal(size=(SMALL, LARGE))
    return small.astype(np.float32), unit(np.tanh(small @ weights)).astype(np.float32)


def loader(number, seed, batch_size=64):
    data = TensorDataset(*map(torch.from_numpy, vectors(number, seed)))

    def collate(pairs):
        return dict(zip(("small", "large"), map(torch.stack, zip(*pairs, strict=True)), strict=True))

    return DataLoader(data, batch_size=batch_size, collate_fn=collate)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("projector")
    module = ProjectorModule(SMALL, LARGE, lr=0.01)
    before = alignment(module.project(vectors(128, 1)[0]), vectors(128, 1)[1])
    fit = trainer(30, default_root_dir=folder, num_sanity_val_steps=0)
    fit.fit(module, loader(512, seed=0), loader(128, seed=1))
    fit.save_checkpoint(folder / "last.ckpt")
    return module, before, fit.callback_metrics, folder / "last.ckpt"


def test_it_learns_what_the_large_encoder_says(trained):
    module, before, metrics, _ = trained
    found = alignment(module.project(vectors(128, 1)[0]), vectors(128, 1)[1])
    assert found.top1 > 0.9 > 0.1 > before.top1
    assert found.cosine > 0.9 > 0.5 > before.cosine
    for name, value in found._asdict().items():
        assert metrics[f"val/{name}"].item() == pytest.approx(value, abs=1e-5)


def test_it_is_linear_relu_linear(trained):
    module = trained[0]
    assert [type(layer).__name__ for layer in module.layers] == ["Linear", "ReLU", "Linear"]
    small = torch.from_numpy(vectors(5, 2)[0])
    first, last = module.layers[0], module.layers[2]
    by_hand = torch.relu(small @ first.weight.T + first.bias) @ last.weight.T + last.bias
    torch.testing.assert_close(module(small), by_hand)
    assert first.weight.shape == (LARGE, SMALL)
    lengths = np.linalg.norm(module.project(small.numpy()), axis=1)
    np.testing.assert_allclose(lengths, 1, atol=1e-6)


def test_its_checkpoint_is_small_and_read_without_pickled_code(trained):
    module, _, _, file = trained
    read = ProjectorModule.load_from_checkpoint(file)
    assert not read.training
    small = vectors(5, 2)[0]
    assert np.array_equal(read.project(small), module.project(small))
    numbers = sum(weight.numel() for weight in module.parameters())
    # weights, two moments of AdamW, the trainer's state
    assert file.stat().st_size < 3 * 4 * numbers + 20_000
    content = torch.load(file, weights_only=True)
    assert content["hyper_parameters"]["small_dimension"] == SMALL


def test_the_same_seed_gives_the_same_projector():
    with torch.random.fork_rng():
        torch.manual_seed(1)
        one = ProjectorModule(SMALL, LARGE, lr=0.01)
        torch.manual_seed(2)
        same, other = ProjectorModule(SMALL, LARGE, lr=0.01), ProjectorModule(SMALL, LARGE, seed=1)
    small = vectors(5, 2)[0]
    assert np.array_equal(one.project(small), same.project(small))
    assert not np.array_equal(one.project(small), other.project(small))


@pytest.mark.parametrize("include_positive", [False, True])
def test_its_loss_is_eq_4(include_positive):
    module = ProjectorModule(SMALL, LARGE, temperature=0.3, include_positive=include_positive)
    batch = next(iter(loader(16, seed=3)))
    losses = module.example_losses(batch)
    assert losses.shape == (16,)
    expected = info_nce(module(batch["small"]), batch["large"], 0.3, include_positive)
    torch.testing.assert_close(losses, expected)


@pytest.mark.parametrize("step", ["training_step", "validation_step"])
def test_other_data_are_refused(step):
    module = ProjectorModule(SMALL, LARGE)
    with pytest.raises(ValueError, match=r"reads vectors of two encoders: .*have no 'small', only 'labels'"):
        getattr(module, step)({"labels": torch.ones(2)}, 0)


def test_what_does_not_fit_is_refused(trained, tmp_path):
    with pytest.raises(ValueError, match=r"temperature=0 must be in \(0"):
        ProjectorModule(SMALL, LARGE, temperature=0)
    with pytest.raises(ValueError, match="hidden_dimension=0 must be at least 1"):
        ProjectorModule(SMALL, LARGE, hidden_dimension=0)
    with pytest.raises(
        ValueError, match=r"takes vectors of dimension 6 and was given \(2, 7\): use the encoder"
    ):
        trained[0].project(np.ones((2, 7), dtype=np.float32))
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        ProjectorModule.load_from_checkpoint(tmp_path / "none.ckpt")
    torch.save(
        {"state_dict": {"weight": torch.ones(1)}, "pytorch-lightning_version": "2.6.0"}, tmp_path / "x.ckpt"
    )
    with pytest.raises(ValueError, match=r"x\.ckpt' is not one of a ProjectorModule"):
        ProjectorModule.load_from_checkpoint(tmp_path / "x.ckpt")
