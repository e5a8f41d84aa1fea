import pytest

from fedlight.support.torch_parts import replaced


class Owner:
    def step(self):
        return "class"


def test_what_was_there_comes_back():
    owner = Owner()
    with replaced(owner, "step", lambda: "other"):
        assert owner.step() == "other"
    assert vars(owner) == {}
    assert owner.step() == "class"
    owner.step = own = lambda: "own"
    with pytest.raises(KeyError), replaced(owner, "step", None), replaced(owner, "step", 1):
        raise KeyError
    assert owner.step is own
