import lightning as L
import numpy as np
import pytest
from fleets import make_fleet, rounds_of, with_buffer, without_wall
from lightning.pytorch.callbacks import ModelCheckpoint
from peft import LoraConfig, get_peft_model
from plain_lightning import Metrics, assert_equal, module, weights
from stacked import Lora, Points, assert_same_rows, fit, furthest
from two_parts import Recorder, TwoParts, close, trained

from fedlight import Ditto, FedAdam, FedAvg, FederatedLoop, FedProx, Visit, Wire
from fedlight.callbacks.loop.parts import LocalBuffers
from fedlight.callbacks.loop.parts.buffered import Buffered
from fedlight.federation import Average, Quantize, TopK
from fedlight.federation.algorithms import FedRep
from fedlight.federation.algorithms.lora import FedSALoRA, FFALoRA
from fedlight.federation.asynchronous import FedBuff

OF_BUFFERED = ("asked_round", "staleness", "start_seconds", "arrival_seconds")
"""Columns of visits.csv that synchronous rounds do not have."""
SIX = dict.fromkeys("abcdef", 8)


def lossy():
    return Wire(up=[TopK(0.3, error_feedback=True), Quantize("int8")], down=Quantize("fp16"))


def of_eight(dataset):
    """Ten clients of eight examples each, so that equal devices take equal times."""
    return {f"c{i}": np.arange(8 * i, 8 * i + 8) for i in range(10)}


def with_lora():
    """The plain module with LoRA on both layers; its optimizer gets the frozen weights, too."""
    model = module()
    model.net = get_peft_model(model.net, LoraConfig(r=2, target_modules=["0", "3"]))
    return model


def seconds_of_upload(folder, **seconds):
    """A fleet whose visits take so many seconds, but for thousandths: the upload of about 550 bytes."""
    return make_fleet(folder, **{name: {"upload_mbps": 0.004 / s} for name, s in seconds.items()})


@pytest.mark.parametrize(
    ("algorithm", "more"),
    [
        (FedAvg, {}),
        (lambda: FedAvg("normalized"), {"server": FedAdam}),
        (lambda: FedProx(mu=0.5), {}),
        (lambda: FedProx(mu=0.5), {"channel": lossy}),
        (lambda: FedAvg("uniform"), {"channel": lossy}),
        (lambda: FedAvg(), {"parts": lambda: [LocalBuffers()], "model": lambda: module(norm=True)}),
        (lambda: Ditto(0.5, 2), {}),
        (lambda: FedRep(["net.3"]), {"clients_per_round": lambda: 10}),  # who comes again is sent less
        (FFALoRA, {"model": lambda: with_lora()}),
        (FedSALoRA, {"model": lambda: with_lora(), "clients_per_round": lambda: 10}),
    ],
)
def test_buffer_cohort_and_concurrency_of_one_size_on_equal_devices_are_the_synchronous_run(
    algorithm, more, tmp_path
):
    found = []
    size = more.get("clients_per_round", lambda: 3)()
    for fedbuff in (None, FedBuff(size)):
        made = {"clients_per_round": 3} | {name: make() for name, make in more.items()}
        fleet = make_fleet(tmp_path, buffered=fedbuff, phone={"tflops": 0.01})
        rows, model, loop, fit = rounds_of(4, of_eight, algorithm=algorithm(), fleet=fleet, **made)
        memories = {name: loop.memory.load(name) for name in loop.clients}
        found.append((rows, weights(model), memories, loop.virtual_seconds, fit.callback_metrics))
    (rows, alone, kept, clock, metrics), (others, buffered, held, time, logged) = found
    assert_equal(alone, buffered)
    assert time == clock > 0
    assert repr(held) == repr(kept)
    for row in others:
        assert (row["staleness"], row["asked_round"]) == (0, row["round"])
        assert row["arrival_seconds"] == row["round_end_seconds"]
    plain = [{k: v for k, v in row.items() if k not in OF_BUFFERED} for row in without_wall(others)]
    assert plain == without_wall(rows)
    assert {name: value for name, value in logged.items() if name in metrics} == metrics
    assert (logged["fed/staleness"], logged["fed/old_models"], logged["fed/at_work"]) == (0, 0, 0)


def test_a_run_has_the_trace_that_is_written_by_hand(tmp_path):
    """Of `test_buffered_schedule.py`: visits of 2, 3 and 7 seconds, a buffer of two, all three at work."""
    fleet = seconds_of_upload(tmp_path, two=2, three=3, seven=7)
    clients = dict.fromkeys("abc", 8)
    more = {"fleet": with_buffer(fleet, FedBuff(2)), "clients_per_round": 3}
    _, rows, _, loop = fit(Lora(), Points(clients), rounds=5, **more)
    unit = min(row["arrival_seconds"] for row in rows) / 2
    found = [
        (row["round"], row["device"], row["asked_round"], row["staleness"], row["arrival_seconds"] / unit)
        for row in sorted(rows, key=lambda row: row["arrival_seconds"])
    ]
    by_hand = [
        *((0, "two", 0, 0, 2), (0, "three", 0, 0, 3), (1, "two", 1, 0, 5), (1, "three", 1, 0, 6)),
        *((2, "seven", 0, 2, 7), (2, "two", 2, 0, 8), (3, "three", 2, 1, 9), (3, "two", 3, 0, 10)),
        *((4, "two", 4, 0, 12), (4, "three", 4, 0, 13)),
    ]
    assert [one[:4] for one in found] == [one[:4] for one in by_hand]
    assert [one[4] for one in found] == pytest.approx([one[4] for one in by_hand], rel=0.01)
    for row in rows:
        begun = [0.0, 3, 6, 8, 10][row["asked_round"]]
        assert row["start_seconds"] / unit == pytest.approx(begun, rel=0.01)
        assert row["round_end_seconds"] / unit == pytest.approx([3, 6, 8, 10, 13][row["round"]], rel=0.01)
    assert loop.virtual_seconds == max(row["round_end_seconds"] for row in rows)


@pytest.mark.parametrize(
    ("fedbuff", "lr", "weight"),
    [
        (FedBuff(2), 0.7, lambda x: (1 + x) ** -0.5),
        (FedBuff(1, staleness="hinge", a=2.0, b=1), 0.5, lambda x: 1.0 if x <= 1 else 1 / (2 * (x - 1) + 1)),
        (FedBuff(3, concurrency=5, staleness="constant"), 1.0, lambda x: 1.0),
    ],
)
def test_the_equations_of_fedbuff(fedbuff, lr, weight, tmp_path):
    """w_{t+1} = w_t + lr / K * sum of s(x_i) (v_i - w_{t - x_i}), each v_i trained in plain torch from w_{t - x_i}."""
    made, recorder = TwoParts("AdamW", lr=0.02), Recorder()
    models = [weights(made)]
    fleet = seconds_of_upload(tmp_path, quick=2, slow=3, slower=11)
    more = {"fleet": with_buffer(fleet, fedbuff), "server": Average(lr)}
    more |= {"algorithm": FedAvg("uniform"), "clients_per_round": 4, "local_steps": 2}
    _, rows, *_ = fit(made, Points(SIX), rounds=7, callbacks=[recorder], **more)
    staleness = {(row["round"], row["client"]): row["staleness"] for row in rows}
    for idx in range(7):
        movements = []
        for visit, batches in recorder.visits[idx]:
            stale = staleness[idx, visit.client_id]
            assert stale == idx - visit.asked
            start = models[idx - stale]
            end = trained(made, start, batches)
            movements.append({n: weight(stale) * (end[n].double() - start[n].double()) for n in start})
        assert len(movements) == fedbuff.buffer_size
        moved = {n: lr * sum(m[n] for m in movements) / len(movements) for n in models[idx]}
        models.append({n: (value.double() + moved[n]).float() for n, value in models[idx].items()})
    close(weights(made), models[-1])
    assert max(staleness.values()) >= 2
    assert furthest(models[-1], models[0]) > 1e-2


def test_batches_are_those_of_the_round_in_which_a_client_was_asked(tmp_path):
    """Also those of a project's own loader, whose shapes were counted then."""
    fleet = seconds_of_upload(tmp_path, quick=2, slow=5)
    more = {"fleet": with_buffer(fleet, FedBuff(2)), "clients_per_round": 5}
    recorder, data = Recorder(), Points(SIX)
    fit(TwoParts(), data, rounds=5, callbacks=[recorder], **more)
    stale = 0
    for idx, visits in recorder.visits.items():
        for visit, batches in visits:
            stale += visit.asked < idx
            positions = data.plan.batches(Visit(visit.client_id, visit.num_batches), visit.asked)
            assert [batch["x"].tolist() for batch in batches] == [data.x[p].tolist() for p in positions]
    assert stale > 2
    *_, loop, _ = rounds_of(1, of_eight, local_steps=None)
    source, late, early = loop._data, Visit("c3", 3, asked=1), Visit("c3", 3)
    assert source._batches(late, 6) == source._batches(early, 1) != source._batches(early, 6)
    assert source._purpose(late) != source._purpose(early)


def test_the_order_in_which_the_visits_of_a_step_are_trained_changes_no_bit(tmp_path, monkeypatch):
    fleet = seconds_of_upload(tmp_path, quick=2, slow=5)
    more = {"fleet": with_buffer(fleet, FedBuff(3)), "clients_per_round": 4}

    def run():
        return fit(TwoParts("AdamW", lr=0.02), Points(SIX), rounds=5, algorithm=FedProx(0.3), **more)

    one, rows, *_ = run()
    plan = Buffered.plan
    monkeypatch.setattr(Buffered, "plan", lambda *args: plan(*args)[::-1])
    other, others, *_ = run()
    assert_equal(one, other)
    assert [row["client"] for row in rows] != [row["client"] for row in others]
    assert_same_rows(others, rows, 0.0 + 1e-12)


def test_clients_side_by_side_may_have_received_different_models(tmp_path):
    fleet = seconds_of_upload(tmp_path, quick=2, slow=3, slower=9)
    more = {"fleet": with_buffer(fleet, FedBuff(4)), "clients_per_round": 6}
    more |= {"algorithm": FedProx(0.1), "rounds": 5}
    alone, rows, *_ = fit(Lora(), Points(SIX), 1, **more)
    beside, others, groups, _ = fit(Lora(), Points(SIX), 4, **more)
    assert furthest(beside, alone) < 1e-6
    assert_same_rows(others, rows)
    asked = {(row["round"], row["client"]): row["asked_round"] for row in rows}
    together = [{asked[idx, name] for name in group} for idx, each in enumerate(groups) for group in each]
    assert max(map(len, together)) > 1  # models in one batch


def test_dropouts_are_counted_and_rounds_without_anybody_wait(tmp_path):
    devices = {
        "moody": {"availability": 0.4, "upload_mbps": 0.002},
        "nightly": {
            "availability": "{intervals_hours: [[0, 0.001]], period_hours: 0.5}",
            "upload_mbps": 0.001,
        },
        "tiny": {"memory_gib": "0.000000001"},
    }
    more = {"fleet": with_buffer(make_fleet(tmp_path, **devices), FedBuff(2))}
    rows, _, loop, fit = rounds_of(12, clients_per_round=4, **more)
    reasons = {row["device"]: {r["reason"] for r in rows if r["device"] == row["device"]} for row in rows}
    assert reasons["tiny"] == {"out_of_memory"}
    assert "left" in reasons["nightly"]
    assert "absent" in reasons["moody"]
    assert loop.rounds_done == fit.current_epoch == 12
    ends = {row["round"]: row["round_end_seconds"] for row in rows}
    for idx, end in ends.items():
        own = [row for row in rows if row["round"] == idx]
        assert len({row["client"] for row in own}) == len(own)
        used = [row for row in own if not row["reason"]]
        assert len(used) <= 2
        for row in own:
            assert row["start_seconds"] <= end
            assert (row["arrival_seconds"] == "") == bool(row["reason"])
            spent = sum(row[f"{phase}_seconds"] for phase in ("download", "compute", "upload"))
            assert row["joules"] == pytest.approx(10 * spent)
            if not row["reason"]:
                assert spent == pytest.approx(row["arrival_seconds"] - row["start_seconds"])
            if row["reason"] in ("absent", "out_of_memory"):
                assert (spent, row["bytes_down"]) == (0, 0)
    assert any(row["reason"] == "left" and row["bytes_down"] > 0 for row in rows)


def test_with_nobody_at_all_the_model_stays_and_the_clock_moves(tmp_path):
    fleet = make_fleet(tmp_path, tiny={"memory_gib": "0.000000001"})
    start = weights(module())
    rows, model, loop, fit = rounds_of(3, fleet=with_buffer(fleet, FedBuff(2)))
    assert_equal(start, weights(model))
    assert {row["reason"] for row in rows} == {"out_of_memory"}
    assert (loop.rounds_done, loop.virtual_seconds) == (3, 1800.0)
    assert "fed/staleness" not in fit.callback_metrics


def test_old_models_are_kept_while_somebody_trains_on_them_and_no_longer(tmp_path):
    """By the trace: c of model 0 is at work until the third step; b of model 2 and c of model 3 behind it."""
    seen = []

    class Watch(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            metrics = {n: float(v) for n, v in trainer.callback_metrics.items()}
            loop = next(one for one in trainer.callbacks if isinstance(one, FederatedLoop))
            kept = loop.remembered()["buffered"]
            seen.append(([*kept["models"]], len(kept["at_work"]), metrics))

    fleet = seconds_of_upload(tmp_path, two=2, three=3, seven=7)
    more = {"fleet": with_buffer(fleet, FedBuff(2)), "clients_per_round": 3}
    module = Lora()
    fit(module, Points(dict.fromkeys("abc", 8)), rounds=5, callbacks=[Watch()], **more)
    assert [models for models, *_ in seen] == [[0], [0], [2], [3], [3]]
    assert [number for _, number, _ in seen] == [1] * 5
    size = 4 * sum(p.numel() for p in module.parameters() if p.requires_grad)
    for models, number, metrics in seen:
        assert metrics["fed/old_models"] == len(models)
        assert metrics["fed/old_model_bytes"] == size * len(models)
        assert metrics["fed/at_work"] == number
    assert [metrics["fed/staleness"] for *_, metrics in seen] == [0, 0, 1, 0.5, 0]
    assert [metrics["fed/staleness_max"] for *_, metrics in seen] == [0, 0, 2, 1, 0]


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_what_those_at_work_have_spent_is_logged_until_they_have_rows(tmp_path):
    """Six seconds in, the client that takes seven has received all, computed all and sent six sevenths."""

    def run(folder, *callbacks, **more):
        fleet = with_buffer(seconds_of_upload(tmp_path, two=2, three=3, seven=7), FedBuff(2))
        seen, data = Metrics("at_work"), Points(dict.fromkeys("abc", 8))
        more |= {"fleet": fleet, "clients_per_round": 3}
        settings = {"enable_checkpointing": folder == "whole", "default_root_dir": tmp_path / folder}
        _, rows, *_ = fit(Lora(), data, rounds=5, callbacks=[seen, *callbacks], settings=settings, **more)
        return rows, seen.rounds

    rows, whole = run("whole", ModelCheckpoint(tmp_path / "whole", filename="{epoch}", save_top_k=-1))
    ended = next(row for row in rows if row["device"] == "seven")
    assert ended["round"] == 2
    now = rows[0]["round_end_seconds"]
    upload = now - ended["download_seconds"] - ended["compute_seconds"]
    assert whole[0]["fed/at_work"] == 1
    assert whole[0]["fed/at_work_bytes_down"] == ended["bytes_down"]
    assert whole[0]["fed/at_work_flops"] == ended["flops"]
    assert whole[0]["fed/at_work_bytes_up"] == int(ended["bytes_up"] * upload / ended["upload_seconds"])
    assert whole[0]["fed/at_work_joules"] == pytest.approx(10 * now)
    _, resumed = run("resumed", ckpt_path=tmp_path / "whole" / "epoch=0.ckpt")
    assert resumed == whole[1:]
