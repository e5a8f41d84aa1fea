import pytest
import torch
from stacked import Points, fit
from two_parts import TwoParts, weights

from fedlight.support.console import one_line_errors


class Greedy(TwoParts):
    """Asks for too much at one step of a run."""

    def __init__(self, ask, step):
        super().__init__()
        self.ask, self.step, self.before = ask, step, None

    def on_train_epoch_start(self):
        self.before = weights(self)

    def training_step(self, batch, batch_idx):
        if self.global_step == self.step:
            self.ask()
        return super().training_step(batch, batch_idx)


def of_python():
    raise MemoryError


def of_torch():
    torch.empty(2**50)


@pytest.mark.parametrize("ask", [of_python, of_torch])
def test_the_client_is_named_and_the_round_is_not_counted(ask, capsys):
    module = Greedy(ask, step=4 * 3 + 4)  # three steps a client: the second client of the second round
    with pytest.raises((MemoryError, RuntimeError)) as caught:
        fit(module, Points())
    (note,) = caught.value.__notes__
    clients = [client for client in "abcd" if f"while {client!r} trained" in note]
    assert note == f"in round 2, while {clients[0]!r} trained"
    assert all(torch.equal(module.before[name], value) for name, value in weights(module).items())
    with pytest.raises(SystemExit) as end, one_line_errors():
        raise caught.value
    assert end.value.code == 2
    line = next(line for line in capsys.readouterr().err.splitlines() if line.startswith("fedlight: "))
    assert line.startswith(f"fedlight: there is not enough memory {note}")
    assert "lower data.batch_size" in line
    assert ("DefaultCPUAllocator: can't allocate memory" in line) == (ask is of_torch)


def test_other_errors_get_no_note():
    def fail():
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ") as caught:
        fit(Greedy(fail, step=1), Points())
    assert not hasattr(caught.value, "__notes__")
