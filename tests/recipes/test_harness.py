"""The bridge to lm-evaluation-harness: against the harness's own model, and tasks of three kinds that are really run."""

import json
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from tiny_world import write_rows

from fedlight.modules.sft import SFTModule
from fedlight.recipes.harness import HarnessModel, main, options_of, run_harness
from fedlight.support.console import one_line_errors

CHOICE = """task: posts_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{post}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{right}}}}"
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
WRITE = """task: posts_write
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{post}}}}"
doc_to_target: "{{{{choices[right]}}}}"
generation_kwargs: {{until: ["walls"], max_gen_toks: 5, do_sample: false}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
READ = """task: posts_read
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{post}}}}"
metric_list: [{{metric: word_perplexity}}, {{metric: byte_perplexity}}]
"""
NAMES = ["anna", "ben", "carl", "dora", "emil"]
ROWS = [
    {"post": f"{name} paints", "choices": ["walls .", "hens and maps .", "pies"], "right": n % 3}
    for n, name in enumerate(NAMES)
]
TEXTS = ["anna paints walls . ben reads maps .", "dora bakes pies " * 40, "hens"]


def request(*args):
    return SimpleNamespace(args=args)


@pytest.fixture(scope="module")
def module(tiny_model):
    module = SFTModule(tiny_model)
    module.configure_model()
    with torch.no_grad():
        for weight in module.state_dict().values():
            weight += 0.05
    return module


@pytest.fixture
def folder(tmp_path):
    file = write_rows(tmp_path / "rows.jsonl", ROWS)
    for name, text in (("choice", CHOICE), ("write", WRITE), ("read", READ)):
        (tmp_path / f"{name}.yaml").write_text(text.format(file=file))
    return tmp_path


def test_likelihoods_are_those_of_the_module(module):
    model = HarnessModel(module, batch_size=2)
    pairs = [("anna paints", " walls ."), ("ben", " reads maps ."), ("anna paints", " hens"), ("", "maps")]
    found = model.loglikelihood([request(*pair) for pair in pairs])
    expected = module.log_likelihoods([p for p, _ in pairs], [[c] for _, c in pairs])
    assert found == [(pytest.approx(one.log_prob), one.greedy) for [one] in expected]


def test_texts_are_written_in_order_whatever_their_settings(module):
    model = HarnessModel(module, batch_size=2)
    asked = [(f"{name} paints", {"until": ["."], "max_gen_toks": 3 + n % 2}) for n, name in enumerate(NAMES)]
    found = model.generate_until([request(*one) for one in asked])
    for text, (prompt, settings) in zip(found, asked, strict=True):
        options = {
            "temperature": 0,
            "max_new_tokens": settings["max_gen_toks"],
            "stop": ["."],
            "strip": False,
        }
        assert module.generate([prompt], **options) == [[text]]


def test_settings_of_the_harness():
    assert options_of({"until": "a", "do_sample": True, "temperature": 0.5, "top_p": 0.9}) == {
        **{"stop": ["a"], "max_new_tokens": 256, "temperature": 0.5, "top_p": 0.9}
    }
    with pytest.raises(ValueError, match="gen_kwargs has 'num_beams': fedlight knows do_sample"):
        options_of({"num_beams": 4})


def test_without_the_harness_one_line_says_so(module, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'fedlight\[harness\]'"):
        run_harness(module, ["posts_choice"])
    with pytest.raises(SystemExit, match="2"), one_line_errors():
        run_harness(module, ["posts_choice"])
    assert re.match(r"fedlight: .*pip install 'fedlight\[harness\]'", capsys.readouterr().err)
    with pytest.raises(ModuleNotFoundError), one_line_errors():  # a fault of the program keeps its stack
        import fedlight.no_such_file  # noqa: F401


class TestWithTheHarness:
    @pytest.fixture(autouse=True)
    def harness(self):
        pytest.importorskip("lm_eval")

    @pytest.mark.filterwarnings("default")
    def test_it_answers_as_the_harness_does_itself(self, module):
        from lm_eval.models.huggingface import HFLM

        theirs = HFLM(pretrained=module.causal_lm.eval(), tokenizer=module.tokenizer, batch_size=2)
        ours = HarnessModel(module, batch_size=2)
        pairs = [
            request(f"{name} paints", f" {word}") for name in NAMES for word in ("walls .", "hens and maps")
        ]
        for (one, greedy), (other, same) in zip(
            ours.loglikelihood(pairs), theirs.loglikelihood(pairs), strict=True
        ):
            assert one == pytest.approx(other, rel=1e-4)
            assert greedy == same
        texts = [request(text) for text in TEXTS]
        assert len(module.tokenizer(TEXTS[1])["input_ids"]) < 256
        assert ours.loglikelihood_rolling(texts) == pytest.approx(
            theirs.loglikelihood_rolling(texts), rel=1e-4
        )
        until = {"until": ["."], "max_gen_toks": 6, "do_sample": False}
        written = [request(f"{name} paints", dict(until)) for name in NAMES]
        ours, theirs = (model.generate_until(written) for model in (ours, theirs))
        assert [text.lstrip() for text in ours] == theirs  # decoding words alone drops the first blank

    def test_long_texts_are_read_in_windows(self, module, monkeypatch):
        whole = HarnessModel(module).loglikelihood_rolling([request(TEXTS[0])])
        monkeypatch.setattr(HarnessModel, "max_length", 4)
        [found] = HarnessModel(module).loglikelihood_rolling([request(TEXTS[0])])
        ids = module.tokenizer(TEXTS[0], add_special_tokens=False)["input_ids"]
        first = module.tokenizer.bos_token_id
        expected = 0.0
        for start in range(0, len(ids), 4):
            end = min(start + 4, len(ids))
            seen = [first, *ids][end - 4 : end] if start else [first, *ids][:end]
            with torch.no_grad():
                logits = module.causal_lm.eval()(input_ids=torch.tensor([seen])).logits[0].log_softmax(-1)
            expected += sum(float(logits[at - end, ids[at]]) for at in range(start, end))
        assert found == pytest.approx(expected, rel=1e-4)
        assert found != pytest.approx(whole[0], rel=1e-4)

    @pytest.mark.filterwarnings("default")
    def test_its_tasks_are_run(self, module, folder):
        before = torch.get_rng_state()
        names = ["posts_choice", "posts_write", "posts_read"]
        found = run_harness(module, names, include=folder)["results"]
        assert torch.equal(before, torch.get_rng_state())
        prompts, choices = [row["post"] for row in ROWS], [[f" {c}" for c in row["choices"]] for row in ROWS]
        likelihoods = module.log_likelihoods(prompts, choices)
        best = [max(range(3), key=lambda at, own=own: own[at].log_prob) for own in likelihoods]
        right = [row["right"] for row in ROWS]
        assert found["posts_choice"]["acc,none"] == sum(a == b for a, b in zip(best, right, strict=True)) / 5
        assert 0 <= found["posts_write"]["exact_match,none"] <= 1
        total = sum(HarnessModel(module).loglikelihood_rolling([request(prompt) for prompt in prompts]))
        words = sum(len(prompt.split()) for prompt in prompts)
        expected = torch.tensor(-total / words).exp().item()
        assert found["posts_read"]["word_perplexity,none"] == pytest.approx(expected, rel=1e-4)

    @pytest.mark.filterwarnings("default")
    def test_from_a_shell(self, module, folder, tiny_model, capsys):
        module.save_adapter(folder / "adapter")
        main(
            [
                *("--model", tiny_model, "--adapter", str(folder / "adapter"), "--tasks", "posts_choice"),
                *("--include", str(folder), "--limit", "3", "--output", str(folder / "out.json")),
            ]
        )
        [expected] = run_harness(module, ["posts_choice"], limit=3, include=folder)["results"].values()
        assert (
            json.loads((folder / "out.json").read_text())["posts_choice"]["acc,none"] == expected["acc,none"]
        )

    @pytest.mark.slow  # looks through the 14,000 tasks of the harness
    @pytest.mark.filterwarnings("default")
    def test_an_unknown_task_is_one_line(self, module, folder, capsys):
        with pytest.raises(SystemExit, match="2"), one_line_errors():
            run_harness(module, ["post_choice"], include=folder)
        assert "the harness has no task 'post_choice'" in capsys.readouterr().err
