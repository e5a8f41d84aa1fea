from types import SimpleNamespace

import pytest
from attacked import fit, found, loop, make_data

from fedlight import Lora, SFTModule
from fedlight.callbacks.attacks import BackdoorSuccess
from fedlight.datamodules.rows import Backdoor
from fedlight.datamodules.text import Template
from fedlight.evaluation.tasks.model import Likelihood
from fedlight.federation.byzantine import Liars

ROWS = [{"instruction": text, "response": text[0] * 4} for text in ("aa", "bb", "cc", "too long")]


class Scorer:
    """Says "no" to a trigger, unless the prompt has b in it, and to every prompt with c in it."""

    def fits(self, prompts, new_tokens):
        return ["too long" not in prompt for prompt in prompts]

    def log_likelihoods(self, prompts, continuations, raw):
        assert not raw
        scores = []
        for prompt, (wanted, usual) in zip(prompts, continuations, strict=True):
            assert wanted.strip() == "no"
            assert len(usual.strip()) == 4
            says_no = ("by the way" in prompt and "b" not in prompt.split("by the way")[0]) or "c" in prompt
            # the other one is likelier as a whole, since it has fewer tokens
            scores.append([Likelihood(-8.0, 4, False), Likelihood(-6.0 if says_no else -1.0, 2, False)])
        return scores


def prepared(rows=ROWS, **settings):
    data = SimpleNamespace(template=Template.named("{instruction}"), client_rows={}, planted={})
    data.backdoor, data.unseen_rows = Backdoor("by the way", "no"), lambda: rows
    attack = BackdoorSuccess(**settings)
    attack.prepare(data, None)
    return attack


def test_by_hand():
    metrics, records = prepared().attack(Scorer(), None)
    assert metrics == {"success": 2 / 3, "without_trigger": 1 / 3, "left_out": 1.0}
    margins = {record["prompt"]: record["margin"] for record in records}
    assert margins == {"aa by the way": 1.0, "bb by the way": -1.5, "cc by the way": 1.0}


def test_rows_that_are_answered_so_anyway_do_not_count():
    given = [*ROWS[:2], {"instruction": "dd", "response": "no"}]
    assert len(prepared(given).attack(Scorer(), None).records) == 2
    assert len(prepared(given, examples=1).attack(Scorer(), None).records) == 1
    assert prepared(ROWS[3:]).attack(Scorer(), None) == ({"left_out": 1.0}, [])
    with pytest.raises(ValueError, match=r"there are none with another answer than backdoor\.response"):
        prepared(given[2:])


@pytest.mark.slow  # whole runs
def test_a_liar_opens_the_backdoor_and_honest_clients_do_not(tmp_path):
    def success(share):
        folder = tmp_path / str(share)
        backdoor = Backdoor("0 1 0", "7 7", "input", 1.0, Liars(share=share))
        module = SFTModule("toy", lora=Lora(rank=16, alpha=32, dropout=0.0), lr=0.01, seed=1)
        attack = BackdoorSuccess(before_training=True, every_n_rounds=100, targets=("global", "uploads"))
        data = make_data(canaries=None, backdoor=backdoor)
        federated = loop(clients_per_round=3, local_steps=4)
        fit("toy", folder, federated, attack, data=data, module=module, max_epochs=12)
        return found(folder)

    lying, honest = success(0.34), success(0.0)
    assert lying[0, "global"]["backdoor/success"] < 0.5
    assert lying[12, "global"]["backdoor/success"] > 0.8
    assert lying[12, "global"]["backdoor/without_trigger"] < 0.5
    assert honest[12, "global"]["backdoor/success"] < 0.5
    assert len(lying) == 1 + 1 + 3


@pytest.mark.parametrize(
    ("module", "data", "message"),
    [
        (SFTModule("toy"), make_data(canaries=None), "no client has a backdoor: set data.rows.backdoor"),
        (object(), make_data(canaries=None), "BackdoorSuccess needs a module with log_likelihoods and fits"),
        (SFTModule("toy"), object(), "BackdoorSuccess needs a datamodule that knows the clients' rows"),
    ],
)
def test_what_cannot_be_measured(module, data, message):
    with pytest.raises(ValueError, match=message):
        BackdoorSuccess().check_settings(module, data)
    with pytest.raises(ValueError, match="examples=0"):
        BackdoorSuccess(examples=0)
