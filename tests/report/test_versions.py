from fedlight.runs.rows import merged

FIT = [{"epoch": str(epoch), "step": str(9 * epoch + 8), "val/loss": f"0.{9 - epoch}"} for epoch in range(3)]


def test_a_validation_of_the_finished_run_leaves_its_curve_and_one_begun_anew_replaces_it() -> None:
    validation = [{"epoch": "0", "step": "0", "val/loss": "0.7", "val/new": "1"}]
    assert merged([FIT, validation]) == [*FIT, {"epoch": "0", "step": "0", "val/loss": "", "val/new": "1"}]
    assert merged([FIT, [{"epoch": "0", "step": "0", "val/loss": "0.7"}]]) == FIT
    assert merged([validation]) == validation
    again = [{"epoch": "0", "step": "8", "val/loss": "0.5"}]
    assert merged([FIT, again]) == again
