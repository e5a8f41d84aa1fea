"""A selector of other choices, with calibrated letters, votes alike in its run, as a judge, and as exported files."""

import json

import numpy as np
import pytest
from answered import predicted
from tiny_world import VOTES, fedlight, tiny_selector, write_rows

from fedlight.datamodules.preferences.completions import CompletionPairDataModule
from fedlight.datamodules.preferences.format import Format
from fedlight.datamodules.rows.rows import load_rows
from fedlight.datamodules.text.encoding import Comparison
from fedlight.export.opened import open_run
from fedlight.export.vote import Selectors
from fedlight.judges.selector_judge import SelectorJudge
from fedlight.modules.selector import ASKED, SelectorModule

LETTERS = {"prior": 0.75, "temperature": 1.5}
PAIRS = [
    Comparison({"prompt": row["prompt"]}, row["response_a"], row["response_b"])
    for row in load_rows(VOTES)
    if row["response_a"] != row["response_b"]
][:16]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    (folder / "letters.json").write_text(json.dumps(LETTERS))
    rows = [{"fields": dict(pair.fields), "completions": [pair.first, pair.second]} for pair in PAIRS]
    write_rows(folder / "pairs.jsonl", rows)
    return folder


@pytest.fixture(scope="module", params=["one", "both"])
def run(request, base, files, tmp_path_factory):
    """A run whose choices are named the other way round, with calibrated letters, trained on one order or on both."""
    folder = tmp_path_factory.mktemp("runs") / request.param
    more = [
        *("--model.choices=[B, A]", f"--model.letters={files / 'letters.json'}", "--model.lr=0.05"),
        *(f"--model.orders={request.param}", "--data.format.twins_together=true", "--model.dtype=fp32"),
        *("--trainer.limit_val_batches=0", "--data.format.trim=null"),
    ]
    done = fedlight("fit", *tiny_selector(base, folder, *more))
    assert done.code == 0, done.err
    return folder


def by_module(run, base, files, orders):
    """What the module of the run's last checkpoint says of the pairs, ``(selectors, pairs, 2)``."""
    module = open_run(run, "last").load()
    return predicted(module, pairs(files, base, orders), len(PAIRS), orders)


def pairs(files, base, orders):
    settings = {"format": Format(choices=("B", "A")), "tokenizer": base, "max_tokens": 128}
    return CompletionPairDataModule(str(files / "pairs.jsonl"), orders, **settings)


def test_judge_and_exported_vote_say_what_the_module_says(run, base, files, tmp_path):
    expected = by_module(run, base, files, "both")
    judge = SelectorJudge(str(run / "adapter"), base, choices=("B", "A"), dtype="fp32")
    assert judge.log_probs(PAIRS) == pytest.approx(expected, abs=1e-5)
    for checkpoint in ([], ["--checkpoint=last"]):
        output = tmp_path / f"out{len(checkpoint)}"
        assert fedlight("export", str(run), f"--output={output}", *checkpoint).code == 0
        exported = Selectors(output, base)
        found = [exported.log_probs(dict(pair.fields), pair.first, f" {pair.second}\n") for pair in PAIRS]
        assert np.moveaxis(np.array(found), 1, 0) == pytest.approx(expected, abs=1e-5)
        again = SelectorJudge(str(output), base, choices=("B", "A"), dtype="fp32")
        assert again.log_probs(PAIRS) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("run", ["one"], indirect=True)
def test_letters_decide_where_one_order_is_read(run, base, files):
    adapter = str(run / "adapter")
    options = {"model": base, "choices": ("B", "A"), "orders": "one", "dtype": "fp32"}
    found = SelectorJudge(adapter, **options).log_probs(PAIRS)
    assert found == pytest.approx(by_module(run, base, files, "one"), abs=1e-5)
    plain = files / "plain.json"
    plain.write_text(json.dumps({"prior": 0.0, "temperature": 1.0}))
    raw = SelectorJudge(adapter, letters=str(plain), **options).log_probs(PAIRS)
    odds, of_raw = (each[..., 0] - each[..., 1] for each in (found, raw))
    assert odds == pytest.approx((of_raw + LETTERS["prior"]) / LETTERS["temperature"], abs=1e-5)


@pytest.mark.parametrize("run", ["both"], indirect=True)
def test_other_settings_than_those_of_the_training_are_refused(run, base, files):
    adapter = str(run / "adapter")
    with pytest.raises(ValueError, match=r"choices=\['B', 'A'\], not \['A', 'B'\]: set choices to that"):
        SelectorJudge(adapter, base)
    with pytest.raises(ValueError, match="head='choice', not 'classifier': set head to that"):
        SelectorModule(base, head="classifier", adapter=adapter)
    with pytest.raises(ValueError, match=r"trained on the mean of both orders.*: set orders to both"):
        SelectorJudge(adapter, base, choices=("B", "A"), orders="one")
    module = SelectorModule(base, choices=("B", "A"), adapter=adapter)
    with pytest.raises(ValueError, match=r"trained on the mean of both orders.*: set orders to both"):
        predicted(module, pairs(files, base, "one"), len(PAIRS), "one")


def test_a_record_is_found_beside_several_adapters_and_may_be_removed(base, tmp_path):
    module = SelectorModule(base, num_adapters=3, choices=("B", "A"))
    module.configure_model()
    module.save_adapter(tmp_path)
    for adapter in (tmp_path, tmp_path / "adapter0"):
        with pytest.raises(ValueError, match=f"remove {ASKED}"):
            SelectorModule(base, adapter=str(adapter))
    (tmp_path / ASKED).unlink()
    assert SelectorModule(base, adapter=str(tmp_path)).asked["choices"] == ["A", "B"]
