import itertools
from types import SimpleNamespace

import pytest

from fedlight.lightning_cli.cli import ReadSettings, find_config
from fedlight.preflight import duration, memory
from fedlight.preflight.finding import State
from fedlight.preflight.machine import MachineMemory
from fedlight.preflight.memory import trainings
from fedlight.preflight.stages import parse_stages
from fedlight.recipes.recipe import stages

ROUNDS = {
    **{"trainer.max_epochs": 6, "trainer.check_val_every_n_epoch": 2, "federated.clients_per_round": 2},
    **{"federated.local_steps": 5, "data.init_args.batch_size": 4, "data.init_args.eval_batch_size": 8},
}
ANSWERS = {"data.init_args.limit": 30, "model.init_args.completions": {"number": 2, "max_new_tokens": 20}}


def forecast(folder, monkeypatch, **given):
    """Findings for stages by name, where a batch takes 3 s, a prompt 0.5 s and a token 0.25 s."""
    parsed, wrong = parse_stages(stages({"stages": given}, folder, 0))
    assert [one.state for one in wrong] == [State.OK], wrong
    monkeypatch.setattr(memory, "step_seconds", lambda *_: 3.0)
    monkeypatch.setattr(duration, "generation_seconds", lambda *_: (0.5, 0.25))
    trained, _ = trainings(parsed, {})
    return trained, {one.what: one.detail for one in duration.check_durations(parsed, trained)}


def test_validation_takes_the_operations_of_its_batches(tmp_path, monkeypatch):
    """No graph and twice the examples, of which the cost of a forward pass tells the share of a step."""
    more = {"limited": 4, "none": 0}
    fits = {
        name: {"fit": "selector.yaml", "with": {**ROUNDS, "trainer.limit_val_batches": limit}}
        for name, limit in {"all": 1.0, **more}.items()
    }
    trained, found = forecast(tmp_path, monkeypatch, **fits)
    (training,) = trained
    meter, shape = training.work.meter, training.work.shape
    seconds = 3.0 * 2 * meter.forward_cost(shape).flops / meter.cost(shape).flops
    assert 0.2 < seconds / 6 < 0.5
    each = f"batches of 8 examples, at most {seconds:.3g} seconds each"
    assert found["validation of all"] == f"3 times {each}"
    in_all = f"{12 * seconds:.3g} seconds in all"
    assert found["validation of limited"] == f"3 times at most 4 {each}, {in_all}"
    assert "validation of none" not in found


def test_generation_is_prompts_times_tokens_and_measured_once_for_a_model(tmp_path, monkeypatch, capsys):
    answers = {"predict": "completions.yaml", "with": ANSWERS}
    _, found = forecast(tmp_path, monkeypatch, first=answers, again={"like": "first"})
    said = "at most 1,200 tokens, 60 texts of 20: at most 5.5 minutes at 4 tokens/s, measured here"
    assert found == {"generation of first": said, "generation of again": said}
    measuring = "measuring time of generation by toy: two short generations, up to a minute\n"
    assert capsys.readouterr().err == measuring


def test_what_has_no_forecast_is_named_in_one_line(tmp_path, monkeypatch, capsys):
    callbacks, merged = [{"class_path": "Forgetting"}], dict.fromkeys(("model", "adapter", "output"), "x")
    given = {
        "train": {"fit": "selector.yaml", "with": {**ROUNDS, "trainer.callbacks": callbacks}},
        "score": {"test": "selector.yaml", "with": {"model.init_args.adapter": "${run}/train/adapter"}},
        **{"features": {"fit": "polis.yaml"}, "all_prompts": {"predict": "completions.yaml"}},
        "table": {"call": "fedlight.recipes.steps.merge_adapter", "with": merged},
    }
    _, found = forecast(tmp_path, monkeypatch, **given)
    assert found["time that is not counted"] == (
        "score (test), features (fit), all_prompts (predict), functions: 1, Forgetting"
    )
    assert "measuring time of SelectorModule on toy: two batches, up to a minute\n" in capsys.readouterr().err


def test_a_model_that_may_not_fit_is_not_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(duration, "memory_of", lambda cuda: MachineMemory(10**6, "this machine has 1.0 MB"))
    _, found = forecast(tmp_path, monkeypatch, answers={"predict": "completions.yaml", "with": ANSWERS})
    said = "at most 1,200 tokens, 60 texts of 20; not timed, as toy may be too large for this machine"
    assert found == {"generation of answers": said}


def test_two_generations_tell_prompts_from_tokens(monkeypatch):
    """Ticks: 4 s for a first token of 8 texts, 12 s for 17 tokens of them: 0.5 s a prompt, 8 s over 16 x 8 tokens."""
    config = ReadSettings(["predict", "--config", find_config("completions.yaml")]).config["predict"]
    asked = []

    class Words:
        decode = staticmethod(" ".join)

        def __call__(self, text, **_):
            return {"input_ids": text.split()}

    def generate(prompts, temperature, max_new_tokens):
        asked.append((len(prompts), len(prompts[0].split()), max_new_tokens))
        return [["w " * max_new_tokens]] * len(prompts)

    module = SimpleNamespace(tokenizer=Words(), configure_model=int, eval=int, generate=generate)
    ticks = itertools.accumulate([0.0, 4.0, 0.0, 12.0])
    monkeypatch.setattr(duration, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    monkeypatch.setattr(duration, "build", lambda config: (module, None))
    assert duration.generation_seconds(config, prompt_tokens=32) == pytest.approx((0.5, 8 / 16 / 8))
    assert asked == [(8, 31, 1), (8, 31, 17)]
