import torch

from fedlight.augmentation.less.features import RandomProjection


def vectors(rows, sizes, seed=0):
    stream = torch.Generator().manual_seed(seed)
    return {name: torch.randn(rows, *size, generator=stream) for name, size in sizes.items()}


def joined(parts):
    return torch.cat([part.flatten(1) for part in parts.values()], dim=1)


SIZES = {"a": (40, 30), "b": (7,), "c": (90, 20)}
COUNTS = {"a": 1200, "b": 7, "c": 1800}


def test_products_are_kept_on_average_within_the_bound():
    """Over 400 projections: the mean is the product itself, and the variance is not above that of dense random signs."""
    x, y = vectors(1, SIZES, seed=1), vectors(1, SIZES, seed=2)
    y = {name: part + 0.5 * x[name] for name, part in y.items()}
    y["a"][0, :, 3] *= 20  # a column that dwarfs the others, as those of outlier features do
    full_x, full_y = joined(x)[0].double(), joined(y)[0].double()
    product, dimension = full_x @ full_y, 256
    found = []
    for seed in range(400):
        project = RandomProjection(COUNTS, dimension, seed)
        found.append((project(x)[0].double() @ project(y)[0].double()).item())
    found = torch.tensor(found)
    bound = ((full_x @ full_x) * (full_y @ full_y) + product**2) / dimension
    assert abs(found.mean() - product) < 4 * (bound / 400).sqrt()
    assert 0.7 * bound < found.var() < 1.2 * bound


def test_few_coordinates_keep_every_product():
    x = vectors(5, {"a": (30,)})
    found = RandomProjection({"a": 30}, 64, seed=3)(x)
    torch.testing.assert_close(found @ found.T, x["a"] @ x["a"].T)
    assert found.shape == (5, 64)


def test_follows_from_the_seed_alone():
    x, state = vectors(2, SIZES), torch.get_rng_state()
    found = [RandomProjection(COUNTS, 50, seed)(x) for seed in (0, 0, 1)]
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert torch.equal(torch.get_rng_state(), state)


def test_every_coordinate_counts_once():
    """With one number left, it is the sum of the coordinates with their signs: all of them, each by 1."""
    project = RandomProjection({"a": 1000}, 1, seed=0)
    signs = project({"a": torch.eye(1000)})[:, 0]
    assert signs.abs().tolist() == [1.0] * 1000
    assert 400 < int((signs > 0).sum()) < 600
