from dataclasses import replace

import pytest
import torch
import yaml
from tiny_world import fedlight, refused

from fedlight.devices import Fleet, load_device
from fedlight.devices.measure import machine, trial
from fedlight.devices.measure.command import figures, profile_file, profile_text
from fedlight.devices.measure.machine import Rapl
from fedlight.devices.measure.trial import Sizes, SmallTransformer, Trial, measure

CPU = torch.device("cpu")
TINY = Sizes(16, width=16, layers=1, heads=2, words=11, rank=2, examples=2, tokens=4, copied_bytes=1024)
GIB = 2**30
FOUND = Trial(
    processor="Unit 1",
    threads=2,
    memory_bytes=16 * GIB,
    free_bytes=12 * GIB,
    matrix=1024,
    product_flops={"fp32": 2e11, "bf16": 4e11},
    step_flops={"fp32": 5e10, "bf16": 1e11},
    copy_bytes=9e9,
    watts=12.5,
    no_watts="",
)


@pytest.fixture
def no_counters(tmp_path):
    return tmp_path / "powercap"


@pytest.fixture
def tiny(monkeypatch, no_counters):
    """The command on a trial of milliseconds, on a machine without energy counters."""
    real = measure
    monkeypatch.setattr(trial, "measure", lambda seconds, device: real(seconds, "cpu", TINY, no_counters))


def counters(root, **joules):
    """Packages with their microjoules, a part of the first, and the whole platform."""
    for number, (name, spent) in enumerate(joules.items()):
        for zone, kind in (
            (f"intel-rapl:{number}", name.replace("_", "-")),
            (f"intel-rapl:{number}:0", "core"),
        ):
            (root / zone).mkdir(parents=True, exist_ok=True)
            (root / zone / "name").write_text(f"{kind}\n")
            (root / zone / "energy_uj").write_text(f"{spent}\n")
            (root / zone / "max_energy_range_uj").write_text("1000000\n")


def test_energy_of_all_packages_and_a_counter_that_begins_anew(tmp_path):
    counters(tmp_path, package_0=900_000, package_1=100, psys=5)
    rapl = Rapl(tmp_path)
    before = rapl.read()
    counters(tmp_path, package_0=200_000, package_1=50_100, psys=999_999)
    assert rapl.joules(before, rapl.read()) == pytest.approx(0.3 + 0.05)  # 0.1 to the largest value, then 0.2


def test_no_counters(tmp_path, monkeypatch):
    with pytest.raises(OSError, match="no counters"):
        Rapl(tmp_path / "nowhere")
    counters(tmp_path, psys=5)
    with pytest.raises(OSError, match="no counters"):
        Rapl(tmp_path)

    def forbidden(root):
        raise PermissionError(13, "Permission denied", "/sys/energy_uj")

    monkeypatch.setattr(trial, "Rapl", forbidden)
    assert trial._counters(CPU, tmp_path) == (None, "/sys/energy_uj may be read by root alone")
    assert trial._counters(torch.device("cuda"), tmp_path) == (None, "the energy of cuda is not read")


@pytest.mark.parametrize(
    ("limit", "expected"),
    [("max", (None, 3 * 2**20)), (str(4 * 2**20), (4 * 2**20, 2**20)), (str(2**60), (None, 3 * 2**20))],
)
def test_memory_within_the_limit_of_a_container(tmp_path, monkeypatch, limit, expected):
    files = {"MEMINFO": "MemTotal: 99 kB\nMemAvailable:    3072 kB\n", "LIMIT": limit, "USED": str(3 * 2**20)}
    for name, text in files.items():
        (tmp_path / name).write_text(text + "\n")
        monkeypatch.setattr(machine, name, tmp_path / name)
    size, free = machine.memory(CPU)
    assert free == expected[1]
    if expected[0]:
        assert size == expected[0]
    else:
        assert size > 2**28  # that of this machine
    for name in ("MEMINFO", "CPUINFO", "LIMIT", "USED"):
        monkeypatch.setattr(machine, name, tmp_path / "nowhere")
    assert machine.memory(CPU)[1] is None
    assert machine.processor(CPU)


def test_operations_of_a_step_by_hand():
    """Frozen products forward and backward to their inputs, LoRA also to its weights, attention two and five products."""
    width, words, rank, layers, texts, tokens = 8, 11, 2, 2, 3, 5
    model = SmallTransformer(width, layers, 2, words, rank, torch.float32)
    ids = torch.randint(words, (texts, tokens + 1))
    sizes = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
    base, lora = sum(a * b for a, b in sizes), sum(rank * (a + b) for a, b in sizes)
    positions = texts * tokens
    products = positions * (layers * (2 * base + 3 * lora) + 2 * width * words)
    attention = layers * texts * tokens**2 * width * (2 + 5)
    first = positions * (width * 3 * width + rank * width)  # inputs of the first layer need no gradient
    assert model.step_flops(ids) == 2 * (products + attention - first)
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in trained} == {"down", "up"}
    assert not model.embedding.weight.is_meta


@pytest.mark.parametrize(
    ("seconds", "calls", "median"),
    [(10.0, 5, 1.75), (0.1, 4, 2.0)],  # of 10 seconds five are left after the first call, of 0.1 none
)
def test_the_median_without_the_first_call(monkeypatch, seconds, calls, median):
    now, durations = [0.0], iter([5.0, 1.0, 2.0, 1.5, 9.0] if calls == 5 else [5.0, 1.0, 2.0, 9.0])
    monkeypatch.setattr(trial.time, "perf_counter", lambda: now[0])
    found = trial.median_seconds(lambda: now.append(now.pop() + next(durations)), seconds, CPU)
    assert list(durations) == []  # all were made, and none more
    assert found == pytest.approx(median)


def test_figures_of_a_trial():
    assert figures(FOUND) == {"memory_gib": 16.0, "memory_share": 0.75, "tflops": 0.4, "utilisation": 0.25}
    # A step that is faster than the products is the speed of visits.
    found = figures(replace(FOUND, step_flops={"fp32": 5e11, "bf16": 1e11}))
    assert (found["tflops"], found["utilisation"]) == (0.5, 1.0)


def test_other_work_is_what_keeps_cores_busy_while_this_process_sleeps(tmp_path, monkeypatch):
    """Of 4 cores one and a half for a second: 100 ticks each; what they did before counts for nothing."""
    stat = tmp_path / "stat"
    stat.write_text("cpu  9000 10 5000 1000 50 0 20 0 0 0\ncpu0 1 2 3\n")

    def sleep(seconds):
        assert seconds == 1.0
        stat.write_text("cpu  9100 10 5030 1240 60 0 35 5 7 0\ncpu0 1 2 3\n")

    monkeypatch.setattr(machine, "STAT", stat)
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 4)
    monkeypatch.setattr(machine.time, "sleep", sleep)
    assert machine.load(1.0) == 1.5
    monkeypatch.setattr(machine, "STAT", tmp_path / "none")
    assert machine.load(1.0) is None


def test_a_profile_is_that_of_the_trial(tmp_path):
    file = tmp_path / "my_laptop.yaml"
    file.write_text(profile_text("my_laptop", FOUND))
    device = load_device(str(file))
    assert {name: getattr(device, name) for name in figures(FOUND)} == figures(FOUND)
    assert (device.watts, device.weight_bits) == (12.5, 16)
    assert device.compute_seconds(1e11) == pytest.approx(1.0)  # as fast as the fastest training step
    assert (device.download_mbps, device.upload_mbps) == (94, 50)
    text = file.read_text()
    for said in ("0.2 in fp32, 0.4 in bf16", "0.05 in fp32, 0.1 in bf16", "9 GB a second", "not measured"):
        assert said in text
    assert "RAPL" in text
    text = profile_text("other", FOUND, watts=30, download_mbps=10, upload_mbps=5)
    given = load_device_text(tmp_path, text)
    assert (given.watts, given.download_mbps, given.upload_mbps) == (30, 10, 5)


def test_a_busy_machine_is_told(tmp_path, monkeypatch):
    said = "Other work kept 3.2 cores busy"
    assert said in profile_text("other", replace(FOUND, load=3.2))
    assert "Other work" not in profile_text("other", replace(FOUND, load=0.2))
    monkeypatch.setattr(trial, "measure", lambda *args: replace(FOUND, load=3.2))
    outcome = fedlight("device", "measure", "--name=busy", f"--folder={tmp_path}")
    assert "other work kept 3.2 cores busy: measure again on an idle machine" in outcome.out
    assert load_device(str(tmp_path / "busy.yaml")).watts == 12.5


def load_device_text(folder, text):
    (folder / "other.yaml").write_text(text)
    return load_device(str(folder / "other.yaml"))


def test_power_that_was_not_read_is_null_and_a_run_refuses_it(tmp_path):
    blind = replace(FOUND, watts=None, no_watts="/sys/x may be read by root alone", free_bytes=None)
    text = profile_text("other", blind)
    assert yaml.safe_load(text)["watts"] is None
    assert yaml.safe_load(text)["memory_share"] == 0.5
    assert "null, as /sys/x may be read by root alone" in text
    assert "half of it for training is an estimate" in text
    with pytest.raises(ValueError, match="watts is null: it could not be measured; write in a number"):
        load_device_text(tmp_path, text)


def test_a_trial_of_milliseconds(tmp_path):
    counters(tmp_path, package_0=5)
    found = measure(0.02, "cpu", TINY, tmp_path)
    assert set(found.product_flops) == set(found.step_flops) == {"fp32", "bf16"}
    assert min(*found.product_flops.values(), *found.step_flops.values(), found.copy_bytes) > 0
    assert found.threads == torch.get_num_threads()
    assert found.watts is None
    assert "stand still" in found.no_watts


def test_power_is_energy_over_time(tmp_path, monkeypatch):
    counters(tmp_path, package_0=5)

    def steps(*args):
        now[0] += 2.0
        counters(tmp_path, package_0=int(5 + 1e5 * now[0]))
        return 1.0

    now = [0.0]
    monkeypatch.setattr(trial, "step_flops", steps)
    monkeypatch.setattr(trial.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(trial, "measure_products", lambda *args: {"fp32": 1.0})
    monkeypatch.setattr(trial, "_copy_bytes", lambda *args: 1.0)
    assert measure(1, "cpu", TINY, tmp_path).watts == pytest.approx(0.1)


@pytest.mark.parametrize(("seconds", "device"), [(0, "cpu"), (float("inf"), "cpu"), (1, "mps"), (1, "cuda")])
def test_a_trial_that_cannot_be(monkeypatch, seconds, device):
    monkeypatch.setattr(trial, "has_cuda", lambda: False)
    with pytest.raises(ValueError, match=r"--seconds|--device"):
        measure(seconds, device, TINY)


@pytest.mark.usefixtures("tiny")
def test_the_command_writes_a_profile_that_is_found_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outcome = fedlight("device", "measure", "--name", "my_laptop", "--seconds", "0.02", "--watts", "15")
    assert outcome.code == 0, outcome.err
    for said in ("measuring this machine for 0.02 s", "GB a second", "devices/my_laptop.yaml is written"):
        assert said in outcome.out
    assert "null" not in outcome.out
    assert load_device("my_laptop") == load_device("devices/my_laptop.yaml")
    assert Fleet({"my_laptop": 1}).devices["my_laptop"].watts == 15


@pytest.mark.usefixtures("tiny")
def test_without_counters_the_command_says_that_power_is_null(tmp_path, monkeypatch, no_counters):
    monkeypatch.chdir(tmp_path)
    outcome = fedlight("device", "measure", "--name=my_laptop", "--seconds=0.02", "--folder=own")
    assert outcome.code == 0, outcome.err
    assert f"watts is null, as {no_counters} has no counters" in " ".join(outcome.out.split())
    assert "--watts gives the power" in outcome.out
    with pytest.raises(ValueError, match="watts is null"):
        load_device("own/my_laptop.yaml")


def test_a_profile_is_replaced_by_force_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(trial, "measure", lambda *args: pytest.fail("two minutes for nothing"))
    (tmp_path / "mine.yaml").write_text("mine")
    for arguments, complaint in {
        ("--name=mine",): "mine.yaml exists: --force replaces it",
        ("--name=pixel_8_pro",): "fedlight has a device of this name",
        ("--name=other", "--watts=-1"): "--watts -1.0: give a number above 0",
    }.items():
        outcome = fedlight("device", "measure", *arguments, f"--folder={tmp_path}")
        assert complaint in refused(outcome)
    assert profile_file("mine", tmp_path, force=True) == tmp_path / "mine.yaml"
    for name in ("../mine", "a/b", "", ".hidden", "mine.yaml"):
        with pytest.raises(ValueError, match="letters, digits"):
            profile_file(name, tmp_path, force=False)
    assert fedlight("device").code == 2
    assert "--name" in fedlight("device", "measure").err
    assert (tmp_path / "mine.yaml").read_text() == "mine"
    assert [file.name for file in tmp_path.iterdir()] == ["mine.yaml"]
