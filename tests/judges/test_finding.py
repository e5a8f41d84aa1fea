import pytest

from fedlight.judges.finding import finding


def row(method, seed=0, **measures):
    return {"method": method, "seed": seed, **measures}


def test_a_win_rate_with_its_interval_against_the_raw_model():
    tuned = row("FedBis", win_rate_vs_raw=0.755, win_rate_vs_raw_low=0.7199, win_rate_vs_raw_high=0.7916)
    rows = [row("raw", win_rate_vs_raw=0.5), tuned, row("oracle", win_rate_vs_raw=0.8)]
    assert finding(rows) == "FedBis: tuned answers win 75.5 % [72.0, 79.2] against the raw model."


def test_an_interval_with_one_half_in_it_is_noise():
    rows = [row("raw", win_rate=0.5), row("DPO", win_rate=0.52, win_rate_low=0.48, win_rate_high=0.56)]
    assert finding(rows) == "DPO: tuned answers win 52.0 % [48.0, 56.0] against the raw model, within noise."


def test_win_rates_of_several_seeds_have_students_interval_within_0_and_1():
    def of_seeds(*rates):
        raw = [row("raw", seed, win_rate=0.5) for seed in range(len(rates))]
        return finding(raw + [row("x", seed, win_rate=rate) for seed, rate in enumerate(rates)])

    # mean 0.7, half width 4.3027 * 0.1 / sqrt(3) = 0.2484
    said = "x: tuned answers win 70.0 % [45.2, 94.8] against the raw model over 3 seeds, within noise."
    assert of_seeds(0.6, 0.7, 0.8) == said
    assert "75.0 % [0.0, 100.0]" in of_seeds(0.5, 1.0)


def test_the_judge_that_the_model_was_tuned_for_is_not_the_answer():
    tuned = row("FedBis", win_rate_by_selector=0.9, win_rate_vs_raw=0.6)
    assert "60.0 %" in finding([row("raw", win_rate_by_selector=0.5, win_rate_vs_raw=0.5), tuned])


def test_an_accuracy_before_and_after():
    rows = [row("raw", selector_accuracy=0.51), row("FedBis", selector_accuracy=0.83)]
    text = "FedBis: selector accuracy 0.830, before training 0.510. With one seed, chance is not ruled out."
    assert finding(rows) == text


@pytest.mark.parametrize(("gains", "chance"), [((0.1, 0.11, 0.12), "beyond"), ((0.3, -0.1, 0.1), "within")])
def test_of_several_methods_the_best_against_the_first(gains, chance):
    rows = []
    for seed, gain in enumerate(gains):
        rows += [row("FedAvg", seed, own=0.5), row("local", seed, own=0.2)]
        rows += [row("FedBiscuit", seed, own=0.5 + gain), row("perfect selector", seed, own=0.99)]
        rows += [row("differences: FedAvg", seed, own=0.7)]
    mean = 0.5 + sum(gains) / 3
    assert finding(rows) == (
        f"FedBiscuit has the best mean accuracy over clients of 3 methods: {mean:.3f} against 0.500 of FedAvg over 3 seeds, "
        f"{chance} noise."
    )


def test_the_baseline_may_be_the_best():
    rows = [row("FedAvg", own=0.6), row("local", own=0.3), row("FedProx", own=0.5)]
    said = "FedAvg has the best mean accuracy over clients of 3 methods: 0.600 against 0.500 of FedProx"
    assert finding(rows) == f"{said}. With one seed, chance is not ruled out."


def test_only_seeds_that_both_have_are_compared():
    raw = [row("raw", seed, accuracy=0.5, win_rate=0.5) for seed in (0, 1)]
    tuned = [row("x", seed, accuracy=0.6 + seed / 10, win_rate=0.9) for seed in range(6)]
    without = [{name: value for name, value in each.items() if name != "win_rate"} for each in raw + tuned]
    assert finding(without) == "x: accuracy 0.650, before training 0.500 over 2 seeds, within noise."
    assert "win 90.0 % [90.0, 90.0] against the raw model over 6 seeds, beyond noise." in finding(raw + tuned)
    assert finding([row("raw", 7, accuracy=0.5), row("x", 1, accuracy=0.6)]).endswith(
        "0.500. No seed has both."
    )


def test_without_a_known_measure_nothing_is_said():
    assert finding([row("a", product_error=0.1), row("b", product_error=0.2)]) == ""
    assert finding([row("a", accuracy=0.5)]) == ""
    assert finding([row("a", accuracy=float("nan")), row("b", accuracy=True)]) == ""
    assert finding([]) == ""
