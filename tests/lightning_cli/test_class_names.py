import subprocess
import sys

import pytest
from ranks import run_ranks

from fedlight.federation.algorithm import Algorithm
from fedlight.federation.algorithms.fedprox import FedProx
from fedlight.lightning_cli.class_names import same_class
from fedlight.lightning_cli.cli import OneLineParser, find_by_name


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ("FedDCA", "FedDCA", True),
        ("FedDCA", "fedlight.augmentation.feddca.FedDCA", True),
        ("fedlight.FedDCA", "fedlight.augmentation.feddca.FedDCA", True),
        ("fedlight.FedDCA", "FedDCA", True),
        ("FedDCA", "FedDCAStar", False),
        ("FedDCA", "mine.FedDCA", False),
        ("fedlight.FedDCA", "mine.FedDCA", False),
        ("ClientMemories", "fedlight.federation.client_state.ClientMemories", True),  # not public
        ("Adam", "torch.optim.Adam", True),
        ("json.JSONDecoder", "json.decoder.JSONDecoder", True),  # one class by two paths
        ("collections.abc.Callable", "typing.Callable", False),
        ("nowhere.Adam", "neither.Adam", False),
    ],
)
def test_names_of_a_class(a, b, same):
    assert same_class(a, b) is same
    assert same_class(b, a) is same


def test_public_names_need_no_torch():
    code = (
        "import sys; from fedlight.lightning_cli.class_names import same_class;"
        "assert same_class('fedlight.FedDCA', 'fedlight.augmentation.feddca.FedDCA');"
        "assert not same_class('SFTModule', 'DPOModule');"
        "assert 'torch' not in sys.modules and 'lightning' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_class_of_the_same_name_does_not_make_fedlights_ambiguous(tmp_path):
    """A project has a FedProx, and a config of fedlight names its FedProx by the name alone."""

    def work(rank):
        theirs = [
            type(name, (FedProx,), {"__module__": module})
            for name, module in (("FedProx", "mine"), ("Mine", "first"), ("Mine", "second"))
        ]
        find_by_name()
        parser = OneLineParser(exit_on_error=False)
        parser.add_argument("--algorithm", type=Algorithm)
        assert parser.parse_args(["--algorithm=FedProx"]).algorithm.class_path.startswith("fedlight.")
        with pytest.raises(Exception, match="Multiple subclasses with name Mine"):
            parser.parse_args(["--algorithm=Mine"])
        return len(theirs)

    run_ranks(1, work, tmp_path)  # in a process of their own, whose end takes the classes away
