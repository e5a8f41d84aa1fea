"""What the hub's client says becomes one line with a remedy."""

from types import SimpleNamespace

import pytest
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

from fedlight.support.hub_errors import hub_errors

ANSWER = SimpleNamespace(headers={}, request=None)  # all that the errors look at


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            GatedRepoError("no", response=ANSWER),
            "model='a/b' is gated: accept its terms on the hub and run `hf auth login`",
        ),
        (
            RepositoryNotFoundError("no", response=ANSWER),
            "model='a/b': neither a folder here nor a model on the hub; check the name",
        ),
        (
            ConnectionError("no"),
            "model='a/b' is no folder here, and the hub cannot be reached (ConnectionError): give the folder of a "
            "downloaded model, or wait",
        ),
    ],
)
def test_each_has_its_remedy(error, line):
    with pytest.raises(OSError) as raised, hub_errors("a/b", "or wait"):  # noqa: PT011
        raise error
    assert str(raised.value) == line


def test_an_answer_is_passed_on():
    with hub_errors("a/b"):
        found = 1
    assert found == 1
