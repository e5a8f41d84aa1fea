import time
from functools import partial

import pytest
from fleets import make_fleet, rounds_of, without_wall
from lightning.pytorch.callbacks import LambdaCallback
from plain_lightning import assert_equal, federate, module, weights
from refusals import refusal
from tiny_world import table

from fedlight import FedAvg, FedAvgM, Fleet, VisitLog
from fedlight.devices.clock import IDLE_SECONDS


def test_a_round_with_nobody_left_changes_nothing_and_says_so(tmp_path, caplog):
    fleet = make_fleet(tmp_path, tiny={"memory_gib": "0.000000001"})
    model = module()
    start, given = weights(model), partial(model.training_step)
    model.training_step = given  # as torch.compile is put there
    rows, _, loop, fit = rounds_of(3, model=model, fleet=fleet, server=FedAvgM())
    assert_equal(start, weights(model))
    assert model.training_step is given
    assert [row["reason"] for row in rows] == ["out_of_memory"] * 9
    assert loop.rounds_done == fit.current_epoch == 3
    assert fit.global_step == 3  # of which none changed anything, so that loggers tell the rounds apart
    assert loop.server.state_dict() == {"velocity": {}}
    assert loop.virtual_seconds == 3 * IDLE_SECONDS
    assert fit.callback_metrics["fed/out_of_memory"] == 3
    assert fit.callback_metrics["fed/clients"] == 0
    assert "round 3: nobody is left" in caplog.text
    # torch refuses to clip the values of no gradients
    federate(1, fleet=fleet, settings={"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"})


def test_the_fastest_count_and_the_others_are_surplus(tmp_path):
    fleet = make_fleet(tmp_path, over_selection=1.75, fast={}, slow={"tflops": 0.1})
    rows, _, _, fit = rounds_of(4, fleet=fleet, clients_per_round=4)
    surplus = [row for row in rows if row["reason"] == "surplus"]
    for idx in range(4):
        own = [row for row in rows if row["round"] == idx]
        assert len(own) == 7
        late = {row["device"] for row in own if row in surplus}
        assert [row["reason"] for row in own].count("surplus") == 3
        assert {row["device"] for row in own if not row["reason"]} == {"fast"} or "fast" not in late
    assert fit.callback_metrics["fed/asked"] == 7
    assert fit.callback_metrics["fed/clients"] == 4
    for row in rows:
        spent = sum(row[f"{phase}_seconds"] for phase in ("download", "compute", "upload"))
        assert 0 < spent <= row["round_end_seconds"] - row["round_start_seconds"] + 1e-9
        assert row["joules"] == pytest.approx(10 * spent)
    assert surplus[0]["bytes_down"] > 0
    assert any(row["bytes_up"] < row["bytes_down"] for row in surplus)


def test_who_is_too_slow_for_the_deadline_is_late(tmp_path):
    fleet = make_fleet(tmp_path, deadline_seconds=1.0, fast={}, modem={"upload_mbps": 0.001})
    rows, _, loop, _ = rounds_of(3, fleet=fleet, clients_per_round=10)
    assert {row["device"]: row["reason"] for row in rows} == {"fast": "", "modem": "late"}
    assert loop.virtual_seconds == 3.0


def test_the_speed_of_this_machine_plays_no_part(tmp_path):
    def run(folder, *callbacks):
        devices = {"one": {"tflops": 0.001, "availability": 0.7}, "other": {}}
        fleet = make_fleet(tmp_path / folder, over_selection=1.5, **devices)
        log = VisitLog(str(tmp_path / folder / "visits.csv"))
        model, _ = federate(4, callbacks=[log, *callbacks], fleet=fleet)
        return without_wall(table(tmp_path / folder / "visits.csv")), weights(model)

    sleeps = LambdaCallback(on_train_batch_end=lambda *args: time.sleep(0.01))
    (quick, one), (slow, other) = run("quick"), run("slow", sleeps)
    assert quick == slow
    assert {"", "absent", "surplus"} <= {row["reason"] for row in quick}
    assert_equal(one, other)


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("over_selection", "over_selection=0.0 must be at least 1"),
        ("deadline_seconds", "=0.0 must be above 0"),
    ],
)
def test_settings_that_mean_nothing_are_refused(setting, complaint):
    with refusal(complaint):
        Fleet({"pixel_8_pro": 1}, **{setting: 0.0})


def test_a_fleet_needs_a_base_that_can_be_quantized(tmp_path):
    with refusal(r"weight_bits=4 needs frozen nn\.Linear layers"):
        rounds_of(1, fleet=make_fleet(tmp_path, small={"weight_bits": 4}))


def test_an_algorithm_that_sends_other_than_it_planned_is_named_once(tmp_path, caplog):
    class Fickle(FedAvg):
        started = False

        def start_round(self, round_idx, cohort, federation):
            self.started = True

        def send(self, visit, client, state):
            return {name: value for name, value in state.items() if "bias" in name or not self.started}

        def finish_round(self, movement):
            self.started = False
            return movement

    rounds_of(2, algorithm=Fickle(), fleet=make_fleet(tmp_path, fast={}))
    said = [record.getMessage() for record in caplog.records if "Fickle was to send" in record.getMessage()]
    assert len(said) == 1


def test_hooks_that_look_at_values_are_refused_before_the_round(tmp_path):
    class Looks(FedAvg):
        def reply(self, visiting, trained, work):
            return {name: value for name, value in trained.items() if value.abs().max() > 0.1}

    with refusal(r"how many bytes Looks sends cannot be known .* depend on names and shapes"):
        rounds_of(1, algorithm=Looks(), fleet=make_fleet(tmp_path, fast={}))
    rounds_of(1, algorithm=Looks())  # without devices nobody asks beforehand
