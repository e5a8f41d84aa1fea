import json
from types import SimpleNamespace

import pytest
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

from fedlight.pretrained.hub import find_model, hub_errors, load_tokenizer

ANSWER = SimpleNamespace(headers={}, request=None)  # all that the errors look at


LINES = {
    GatedRepoError: " is gated: accept its terms on the hub and run `hf auth login`",
    RepositoryNotFoundError: ": neither a folder here nor a model on the hub; check the name",
    ConnectionError: " is no folder here, and the hub cannot be reached (ConnectionError): give the folder of a "
    "downloaded model, or wait",
}


@pytest.mark.parametrize("kind", LINES)
def test_each_has_its_remedy(kind):
    error = kind("no") if kind is ConnectionError else kind("no", response=ANSWER)
    with pytest.raises(OSError) as raised, hub_errors("a/b", "or wait"):  # noqa: PT011
        raise error
    assert str(raised.value) == f"model='a/b'{LINES[kind]}"


def test_a_name_that_no_hub_can_have_is_no_question_of_the_network():
    with pytest.raises(FileNotFoundError, match="model='模型': there is no such folder"):
        find_model("模型")


def test_an_answer_is_passed_on():
    with hub_errors("a/b"):
        found = 1
    assert found == 1


def test_a_tokenizer_that_is_code_is_refused_without_a_question(tmp_path):
    config = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text("raise SystemExit('it was run')")
    with pytest.raises(OSError, match=r"data need a folder with its tokenizer\.json") as error:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(error.value)
