import pytest

from fedlight.datamodules.synthesis.prompts import FEWFEDPIT_PROMPTS
from fedlight.datamodules.synthesis.self_generation import NewInstructions, NewResponses, SelfGeneration

KINDS = {"instructions": NewInstructions, "responses": NewResponses}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"number": 0}, "number=0 must be at least 1"),
        ({"responses": {"tries": 0}}, r"responses\.tries=0 must be at least 1"),
        ({"responses": {"demonstrations": -1}}, r"responses\.demonstrations=-1 must be at least 0"),
        ({"responses": {"max_new_tokens": 0}}, r"responses\.max_new_tokens=0 must be at least 1"),
        ({"temperature": -1}, "temperature=-1 must be in"),
        ({"top_p": 0}, r"top_p=0 must be in \(0, 1\]"),
        ({"max_rouge_l": 1.5}, r"max_rouge_l=1.5 must be in \[0, 1\]"),
    ],
)
def test_settings_out_of_range_are_refused(changes, named):
    with pytest.raises(ValueError, match=named):
        SelfGeneration(
            **{key: KINDS[key](**value) if key in KINDS else value for key, value in changes.items()}
        )


def test_settings_name_every_argument():
    settings = SelfGeneration(number=7).settings()
    assert settings["number"] == 7
    assert settings["prompts"] is None
    assert SelfGeneration(prompts=FEWFEDPIT_PROMPTS).settings()["prompts"]["response"]["no_input"] == "none"
    assert SelfGeneration(number=7, instructions=NewInstructions(refusals=["No"])).settings() != settings
