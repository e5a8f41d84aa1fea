import lightning as L
import pytest
import torch
from fleets import make_fleet
from lightning.pytorch.callbacks import Checkpoint, LambdaCallback, ModelCheckpoint
from plain_lightning import Regression, assert_equal, weights
from synthesizing import Batches, Synthesizing, run
from torch import nn

from fedlight import FewFedPIT, Quantize, Wire
from fedlight.federation.client import read


def made_in(data):
    return [entry for entry in data.diary if entry[0] == "synthesize"]


def test_a_round_is_saved_before_candidates_of_the_next_are_made(tmp_path):
    """Making them can take long, and a model can fail at it."""

    class Fails(Synthesizing):
        def synthesize(self, round_idx, client_ids, module):
            if round_idx == 1:
                assert [file.name for file in tmp_path.glob("*.ckpt")] == ["epoch=0.ckpt"]
                raise MemoryError("no room for prompts")
            super().synthesize(round_idx, client_ids, module)

    save = ModelCheckpoint(tmp_path, filename="{epoch}", save_on_train_epoch_end=True)
    more = {"callbacks": [save], "settings": {"enable_checkpointing": True}}
    with pytest.raises(MemoryError, match="no room"):
        run(FewFedPIT(0.5), rounds=2, data=Fails(), **more)
    saved = torch.load(tmp_path / "epoch=0.ckpt", weights_only=True)
    assert saved["callbacks"]["FederatedLoop"]["rounds_done"] == 1


@pytest.mark.parametrize("hook", ["on_validation_end", "on_train_batch_end"])
def test_nothing_is_made_for_a_round_that_does_not_take_place(hook):
    def stop(trainer, *_):
        if trainer.current_epoch == 1:
            trainer.should_stop = True

    stops = LambdaCallback(**{hook: stop})
    _, _, data = run(FewFedPIT(0.5), rounds=5, callbacks=[stops])
    assert [round_idx for _, round_idx, *_ in made_in(data)] == [0, 1]
    _, loop, data = run(FewFedPIT(0.5), rounds=5, callbacks=[stops], settings={"min_epochs": 4})
    assert [round_idx for _, round_idx, *_ in made_in(data)] == [0, 1, 2, 3]
    assert loop.rounds_done == 4


def test_a_trainer_that_was_told_to_stop_and_goes_on_is_refused():
    """Its next round would lack candidates."""

    class SetsBack(Checkpoint):
        def on_train_epoch_end(self, trainer, pl_module):
            trainer.should_stop = False

    class Changes(L.Callback):
        def on_train_start(self, trainer, pl_module):
            trainer.callbacks = [*trainer.callbacks, SetsBack()]  # behind the loop's own last callback

        def on_validation_end(self, trainer, pl_module):
            trainer.should_stop = not trainer.sanity_checking

    with pytest.raises(ValueError, match="round 2 is not planned"):
        run(FewFedPIT(0.5), callbacks=[Changes()])


def test_over_a_lossy_wire_candidates_are_made_by_what_clients_receive():
    starts = []
    watch = LambdaCallback(on_train_epoch_start=lambda _, m: starts.append(read(dict(m.named_parameters()))))
    wire = Wire(up=Quantize("int8"), down=Quantize("int8"))
    plain, _, _ = run(FewFedPIT(0.25))
    model, loop, data = run(FewFedPIT(0.25), channel=wire, callbacks=[watch])
    for (*_, seen), start in zip(made_in(data), starts, strict=True):
        assert_equal(seen, wire.down(start, loop.clients["c0"]).state)
        assert not torch.equal(seen["net.0.weight"], start["net.0.weight"])
    for name, value in weights(model).items():
        torch.testing.assert_close(value, weights(plain)[name], rtol=0.2, atol=0.05)


def test_who_does_not_get_through_drops_out_with_all_visits(tmp_path, caplog):
    """One of three devices uploads too slowly, one is away half of the time; who is away makes nothing."""
    moody = {"availability": 0.5, "tflops": 1}
    fleet = make_fleet(tmp_path, 0, 1.0, 2.0, fast={}, modem={"upload_mbps": 0.001}, moody=moody)
    rows = []

    class Rows(Batches):
        def on_train_epoch_end(self, trainer, pl_module):
            rows.extend(self.loop.visit_records)

    settings = {"fleet": fleet, "clients_per_round": 4}
    _, _, data = run(FewFedPIT(0.5), rounds=4, callbacks=[Rows], **settings)
    assert "was to send" not in caplog.text
    assert {row["reason"] for row in rows} >= {"", "late", "absent"}
    for round_idx, (_, _, made, _) in enumerate(made_in(data)):
        own = [row for row in rows if row["round"] == round_idx]
        there = [row for row in own if not row["reason"]]
        assert [row["split"] for row in there] == ["train", "synthetic"] * (len(there) // 2)
        assert [row["client"] for row in there[::2]] == [row["client"] for row in there[1::2]]
        lost = {row["client"] for row in own if row["reason"]}
        assert not lost & {row["client"] for row in there}
        absent = {row["client"] for row in own if row["reason"] == "absent"}
        assert set(made) == {row["client"] for row in own} - absent


class OnABase(Regression):
    """A frozen layer under the one that learns, for small devices to have in fewer bits."""

    def __init__(self):
        super().__init__(dropout=0.0)
        self.net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 1))
        self.net[2].requires_grad_(False)
        self.net[0].requires_grad_(False)


class BasesSeen(Synthesizing):
    """What the frozen layers give, when candidates are made and chosen."""

    def synthesize(self, round_idx, client_ids, module):
        super().synthesize(round_idx, client_ids, module)
        self.seen = {**getattr(self, "seen", {}), **dict.fromkeys(client_ids, self.base(module))}

    def choose(self, client_id, module):
        super().choose(client_id, module)
        assert torch.equal(self.seen[client_id], self.base(module))

    def base(self, module):
        with torch.no_grad():
            return module.net[:3](torch.ones(1, 4, device=module.device)).cpu()


def test_candidates_are_made_and_chosen_on_the_base_of_the_clients_device(tmp_path):
    torch.manual_seed(0)
    model, data = OnABase(), BasesSeen()
    before = data.base(model)
    fleet = make_fleet(tmp_path, small={"weight_bits": 4}, large={})
    _, loop, _ = run(FewFedPIT(0.5), model=model, data=data, fleet=fleet, clients_per_round=6, rounds=2)
    assert torch.equal(data.base(model), before)
    rows = loop.visit_records
    bits = {row["client"]: row["weight_bits"] for row in rows}
    assert {*bits.values()} == {4, 16}
    for client, number in bits.items():
        assert torch.equal(data.seen[client], before) == (number == 16)
    assert len(made_in(data)) == 4  # two precisions, two rounds
    splits = [(row["client"], row["split"]) for row in rows]
    assert splits == [(client, split) for client, _ in splits[::2] for split in ("train", "synthetic")]
    assert [row["weight_bits"] for row in rows] == sorted((row["weight_bits"] for row in rows), reverse=True)


def test_uploads_are_looked_at_on_the_servers_base_in_the_middle_of_a_visit(tmp_path):
    """As an attack does; the run ends as it would have without."""
    looks = []

    class Looks(Batches):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            other = {"net.3.bias": torch.tensor([9.0])}
            with self.loop.holding(other):
                looks.append((BasesSeen().base(pl_module), pl_module.net[3].bias.item()))

    models = []
    for callbacks in ([], [Looks]):
        torch.manual_seed(0)
        model, data = OnABase(), BasesSeen()
        base, fleet = data.base(model), make_fleet(tmp_path, small={"weight_bits": 4})
        settings = {"fleet": fleet, "callbacks": callbacks, "rounds": 2, "clients_per_round": 2}
        models.append(run(FewFedPIT(0.5), model=model, data=data, **settings)[0])
    assert_equal(weights(models[0]), weights(models[1]))
    assert len(looks) == 16
    assert all(torch.equal(seen, base) and bias == 9.0 for seen, bias in looks)
