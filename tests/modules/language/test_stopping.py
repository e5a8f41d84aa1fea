import pytest
import torch

from fedlight.evaluation.tasks.sampling import Completions
from fedlight.modules.language.generation import make_stopping
from fedlight.modules.sft import SFTModule

PROMPTS = ["the cat", "a dog ran to the park: B day after", "c"]


@pytest.fixture(scope="module")
def module(llama):
    module = SFTModule(llama)
    module.configure_model()
    return module


def test_a_completion_ends_in_front_of_the_first_stop(module):
    plain = [own[0] for own in module.generate(PROMPTS, temperature=0, max_new_tokens=12, strip=False)]
    stop = plain[0][5:8]
    found = [
        own[0] for own in module.generate(PROMPTS, temperature=0, max_new_tokens=12, stop=[stop], strip=False)
    ]
    assert found == [text.split(stop)[0] for text in plain]
    assert found[0] == plain[0][: plain[0].index(stop)] != plain[0]


def test_nothing_is_written_behind_the_last_stop(module, monkeypatch):
    [[text]] = module.generate(PROMPTS[:1], temperature=0, max_new_tokens=30, strip=False)
    steps = []
    forward = module.causal_lm.forward
    monkeypatch.setattr(module.causal_lm, "forward", lambda *a, **k: steps.append(1) or forward(*a, **k))
    module.generate(PROMPTS[:1], temperature=0, max_new_tokens=30, stop=[text[3]])
    assert len(steps) < 15


def test_samples_stop_too_and_draw_the_same(module):
    drawn = module.generate(PROMPTS, n=3, max_new_tokens=10, seed=4, strip=False)
    stop = drawn[1][2][4:6]
    found = module.generate(PROMPTS, n=3, max_new_tokens=10, seed=4, strip=False, stop=[stop])
    assert found == [[text.split(stop)[0] for text in own] for own in drawn]


def test_a_stop_is_seen_where_it_crosses_tokens(module):
    ids = torch.tensor([module.tokenizer("the cat sat on")["input_ids"]])
    width = len(module.tokenizer("the")["input_ids"])
    assert make_stopping(module.tokenizer, ["t sat o"], width)(ids, None).tolist() == [True]
    # that is the prompt
    assert make_stopping(module.tokenizer, ["the c"], width)(ids, None).tolist() == [False]


def test_an_empty_stop_is_refused(module):
    with pytest.raises(ValueError, match="an empty text would end every completion"):
        module.generate(PROMPTS, max_new_tokens=2, stop=["x", ""])


def test_blanks_stay_where_they_are_wanted(module):
    texts = module.generate(PROMPTS, n=20, temperature=1.5, max_new_tokens=6, seed=1, strip=False)
    flat = [text for own in texts for text in own]
    assert [text.strip() for text in flat] == [
        text
        for own in module.generate(PROMPTS, n=20, temperature=1.5, max_new_tokens=6, seed=1)
        for text in own
    ]
    assert any(text != text.strip() for text in flat)


def test_a_tokenizer_that_drops_the_first_blank(tiny_model):
    """Words of the embedded world are joined by blanks; what follows a prompt begins with one."""
    module = SFTModule(tiny_model)
    [[bare]] = module.generate(["anna paints"], temperature=0, max_new_tokens=4)
    [[whole]] = module.generate(["anna paints"], temperature=0, max_new_tokens=4, strip=False)
    ids = module.tokenizer("anna paints")["input_ids"]
    written = module.tokenizer(bare, add_special_tokens=False)["input_ids"]
    assert "anna paints" + whole == module.tokenizer.decode([*ids, *written], skip_special_tokens=True)


def test_what_fits_is_known_beforehand(module):
    prompts = ["the cat", "the cat sat on the mat, and then some other animal came"]
    lengths = [len(module.tokenizer(prompt)["input_ids"]) for prompt in prompts]
    assert module.fits(prompts, 64 - lengths[1]) == [True, True]
    assert module.fits(prompts, 64 - lengths[1] + 1) == [True, False]
    assert len(module.generate(prompts, max_new_tokens=64 - lengths[1])) == 2
    with pytest.raises(ValueError, match="prompt 1 has"):
        module.generate(prompts, max_new_tokens=64 - lengths[1] + 1)


def test_a_stop_text_outside_of_a_list_is_refused(module):
    """Each of its letters would be a stop text."""
    with pytest.raises(ValueError, match=r"stop='Question:' is one text.* give \['Question:'\]"):
        module.generate(PROMPTS, stop="Question:")


def test_predictions_end_before_the_stop_of_their_batch(llama):
    """Alpaca's next header comes so in the batches of a PromptDataModule."""
    module = SFTModule(llama, completions=Completions(max_new_tokens=10))
    plain = module.predict_step({"prompt": PROMPTS}, 0)
    stop = plain[0][0][3:6]
    cut = module.predict_step({"prompt": PROMPTS, "stop": [stop]}, 0)
    assert cut == [[text.split(stop)[0].strip() for text in own] for own in plain]
    assert cut[0] != plain[0]
