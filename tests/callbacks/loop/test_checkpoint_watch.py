import pytest
import torch
from damage import damaged
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from memories import loop_with
from plain_lightning import Numbers, assert_equal, module, ten_clients, trainer, weights

from fedlight import FederatedWrapper, Scaffold
from fedlight.federation import ClientMemories

pytestmark = [
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
]


def fit(folder, rounds=3, ckpt_path=None, do="fit", **settings):
    """A run with memories on disk, of which one round is kept."""
    saves = ModelCheckpoint(folder / "saved", save_top_k=1)
    memory = ClientMemories(limit_mib=0)
    loop = loop_with(algorithm=Scaffold(), clients_per_round=3, local_steps=2, memory=memory)
    model = module(optimizer="SGD")
    run = trainer(rounds, [saves, loop], default_root_dir=folder, enable_checkpointing=True, **settings)
    getattr(run, do)(model, FederatedWrapper(Numbers(), ten_clients), ckpt_path=ckpt_path, weights_only=True)
    return model


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The weights of three rounds, and the folder of two."""
    folder = tmp_path_factory.mktemp("whole")
    fit(folder / "two", rounds=2)
    return weights(fit(folder / "three")), folder / "two"


def test_a_damaged_checkpoint_is_refused_or_goes_on_as_a_whole_one(whole, tmp_path):
    expected, folder = whole
    good = next((folder / "saved").glob("*.ckpt")).read_bytes()
    file = tmp_path / "damaged.ckpt"
    refused = 0
    for what, content in damaged(good, flips=10):
        file.write_bytes(content)
        model, error = None, None
        try:
            model = fit(tmp_path / "run", ckpt_path=file)
        except ValueError as raised:
            error = str(raised)
        if error is None:  # of a byte that nobody reads, between the parts of the file
            assert_equal(weights(model), expected)
        else:
            assert error.startswith(f"checkpoint '{file}' is damaged or no checkpoint ("), what
            assert error.endswith("): use another")
            refused += 1
    assert refused >= 10


def test_a_flipped_weight_is_refused_by_whatever_loads_it(whole, tmp_path):
    """torch alone takes it."""
    _, folder = whole
    good = next((folder / "saved").glob("*.ckpt"))
    weight = torch.load(good, weights_only=True)["state_dict"]["net.0.weight"].numpy().tobytes()
    content = good.read_bytes()
    place = content.index(weight) + len(weight) // 2
    file = tmp_path / "flipped.ckpt"
    file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    torch.load(file, weights_only=True)
    for do in ("fit", "validate"):
        with pytest.raises(ValueError, match=r"is damaged or no checkpoint \(checksum of .*\): use another"):
            fit(tmp_path / "run", ckpt_path=file, do=do)


def test_other_errors_of_loading_stay_what_they_are(tmp_path):
    with pytest.raises(FileNotFoundError):
        fit(tmp_path, ckpt_path=tmp_path / "no.ckpt")


class BreaksOff(TorchCheckpointIO):
    """Writes one checkpoint, and fails at the second."""

    saved = 0

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        self.saved += 1
        if self.saved == 2:
            raise RuntimeError("the plug is pulled")
        super().save_checkpoint(checkpoint, path, storage_options)


def test_a_run_that_ends_while_it_saves_goes_on_from_the_checkpoint_before(whole, tmp_path):
    expected, _ = whole
    with pytest.raises(RuntimeError, match="the plug is pulled"):
        fit(tmp_path, plugins=[BreaksOff()])
    (checkpoint,) = (tmp_path / "saved").glob("*.ckpt")
    assert checkpoint.name.startswith("epoch=0")
    assert_equal(weights(fit(tmp_path, ckpt_path=checkpoint)), expected)
