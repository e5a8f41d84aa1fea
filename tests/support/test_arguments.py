import copy
import dataclasses
import math
import pickle
from pathlib import Path

import numpy as np
import pytest

from fedlight import (
    AdapterExport,
    Algorithm,
    ByClient,
    FedAdam,
    FedAvg,
    FederatedLoop,
    FedProx,
    InstructionDataModule,
    Partition,
    PreferenceDataModule,
    Quantize,
    SelectorModule,
    SelfGeneration,
    SFTModule,
    SyntheticInstructionDataModule,
    TrimmedMean,
    VisitLog,
)
from fedlight.callbacks.logs import ClientAccuracy, GroupLog
from fedlight.callbacks.loop.parts.optimizers import StepSchedules
from fedlight.datamodules.clients import FewShot
from fedlight.datamodules.preferences.format import Format
from fedlight.datamodules.rows import Canaries
from fedlight.datamodules.rows.exclusion import Excluded, Holdout
from fedlight.datamodules.rows.given import name_source
from fedlight.datamodules.rows.poison import Backdoor, PoisonedVotes
from fedlight.datamodules.synthesis import SelfGenerationPrompts
from fedlight.datamodules.synthesis.prompts import InstructionPrompt
from fedlight.datamodules.vectors.clusters import PseudoLabels
from fedlight.evaluation.tasks.sampling import Completions, Sampling
from fedlight.federation.algorithm import WeightedSum
from fedlight.federation.algorithms.lora.hetlora import HetLoRA
from fedlight.federation.byzantine.liars import Liars
from fedlight.federation.client import Identity
from fedlight.lightning_cli.class_names import CLASS_FILES, class_of
from fedlight.modules.language.adapters import Lora
from fedlight.modules.language.base_model import Execution
from fedlight.modules.language.optimizers import Optimization
from fedlight.support.checks import Checked, _constructors
from fedlight.support.seeding import derive_seed

ROWS = [{"instruction": "w1", "response": "x"}]


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: FederatedLoop(clients_per_round=2.5), "Loop: clients_per_round=2.5 must be a whole number"),
        (lambda: FederatedLoop(clients_per_round="4"), "Loop: clients_per_round='4' must be a whole number"),
        (
            lambda: FederatedLoop(clients_per_round=True),
            "Loop: clients_per_round=True must be a whole number",
        ),
        (lambda: FederatedLoop(clients_per_round=-1), "clients_per_round=-1 must be at least 1"),
        (
            lambda: FederatedLoop(algorithm="FedProx"),
            "FederatedLoop: algorithm='FedProx' must be an Algorithm or None: give an object, algorithm=FedProx()",
        ),
        (
            lambda: FederatedLoop("fedprox"),
            "algorithm='fedprox' must be an Algorithm or None: give an object",
        ),
        (lambda: FederatedLoop(algorithm=FedProx), "algorithm=FedProx must be an Algorithm or None: give an"),
        (lambda: FederatedLoop(server=FedAvg()), "must be a ServerOptimizer or None"),
        (
            lambda: FederatedLoop(aggregation="TrimedMean"),
            "an Aggregation or None: give an object, aggregation=Trimmed",
        ),
        (lambda: FederatedLoop(aggregation=TrimmedMean), "None: give an object, aggregation=TrimmedMean()"),
        (lambda: FederatedLoop(aggregation=[]), "aggregation=[] must be an Aggregation or None"),
        (lambda: WeightedSum("wieght"), "divide_by='wieght' must be 'weight', 'count' or 'one'"),
        (lambda: FedAdam(lr=math.inf), "lr=inf must be above 0 and finite at the server"),
        (lambda: FedAdam(tau=math.inf), "tau=inf must be above 0 and finite at the server"),
        (lambda: SFTModule("toy", lr=math.inf), "lr=inf must be in (0, inf)"),
        (lambda: Lora(dropout=1), "lora.dropout=1 must be in [0, 1)"),
        (
            lambda: StepSchedules("restar"),
            "next_round='restar' is not one of continue, restart; did you mean",
        ),
        (lambda: HetLoRA(ranks=3), "HetLoRA: ranks=3 must be a dict[str, int] or a list[int] or"),
        (lambda: FedProx("0.1"), "FedProx: mu='0.1' must be a number"),
        (lambda: SFTModule(3), "SFTModule: model=3 must be a text"),
        (lambda: SFTModule("toy", lr="1e-3"), "SFTModule: lr='1e-3' must be a number"),
        (lambda: SelectorModule("toy", lora=Lora(rank=2.0)), "Lora: rank=2.0 must be a whole number"),
        (lambda: SelectorModule("toy", choices="AB"), "SelectorModule: choices='AB' must be a Sequence[str]"),
        (lambda: Partition(by="iidd"), "by='iidd' is not one of client, dirichlet, iid; did you mean 'iid'?"),
        (
            lambda: InstructionDataModule(ROWS, partition="iid"),
            "InstructionDataModule: partition='iid' must be a Partition or None: give an object, partition=Partition()",
        ),
        (
            lambda: SyntheticInstructionDataModule(ROWS, SelfGeneration(), batch_size=2.5),
            "batch_size=2.5 must",
        ),
        (lambda: InstructionDataModule(ROWS, columns={"response": 3}), "must be a dict[str, str] or None"),
        (lambda: PreferenceDataModule(view="select"), "view='select' is not one of selector, dpo, sft; did"),
        (lambda: ByClient([0, 1]), "ByClient: clients=[0, 1] must be a function or a Mapping"),
        (lambda: VisitLog(3), "VisitLog: path=3 must be a text or None"),
        (lambda: AdapterExport(3), "AdapterExport: folder=3 must be a text"),
        (lambda: TrimmedMean("0.1"), "TrimmedMean: share='0.1' must be a number"),
        (lambda: Quantize(8.0), "Quantize: to=8.0 is not one of fp16, bf16, int8, nf4"),
    ],
)
def test_a_wrong_argument_is_told_what_it_must_be(make, told):
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the text is compared
        make()
    assert told in str(error.value)


def test_right_ones_pass_copies_are_made_and_others_refused_as_ever():
    loop = FederatedLoop(FedProx(np.float32(0.5)), FedAdam(), clients_per_round=np.int64(4), local_steps=None)
    assert loop.clients_per_round == 4
    assert Partition(num_clients=np.int32(3)).num_clients == 3
    # Any
    assert PreferenceDataModule(format=Format(choice_values={"a": 1, "b": ["2"]})).choice_values["a"] == 1
    # as a config gives it
    assert PreferenceDataModule(format=Format(choices=["A", "B"])).choices == ["A", "B"]
    with pytest.raises(TypeError, match="takes no arguments"):
        Identity(3)
    with pytest.raises(TypeError, match="unexpected keyword argument 'nu'"):
        FedProx(nu=1)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'model'"):
        SFTModule()
    for made in (Partition("iid", num_clients=3), FedProx(0.5)):
        assert vars(copy.deepcopy(made)) == vars(pickle.loads(pickle.dumps(made))) == vars(made)
    for log in (VisitLog(), GroupLog(), ClientAccuracy()):
        assert copy.deepcopy(log).state_dict() == pickle.loads(pickle.dumps(log)).state_dict()


def test_a_class_of_somebody_else_is_checked_where_it_passes_arguments_on():
    class Mine(FederatedLoop):
        def __init__(self, rounds: int = "many", **kwargs):  # annotated loosely
            super().__init__(**kwargs)

    assert Mine().clients_per_round == 10
    with pytest.raises(ValueError, match=r"Mine: clients_per_round=2\.5 must be a whole number"):
        Mine(clients_per_round=2.5)


def test_a_path_is_a_text_and_a_checkpoint_holds_plain_values():
    assert VisitLog(Path("a.csv")).path == Path("a.csv")
    assert name_source(Path("a.csv")) == "a.csv"
    saved = SFTModule(Path("my_model"), lr=np.float64(0.5), seed=np.int64(3)).hparams
    values = [saved[name] for name in ("model", "lr", "seed")]
    assert values == ["my_model", 0.5, 3]
    assert [type(value) for value in values] == [str, float, int]
    assert derive_seed(np.int64(3), "visit") == derive_seed(3, "visit") != derive_seed("3", "visit")


def test_the_annotations_of_every_public_class_can_be_read():
    classes = [each for each in map(class_of, CLASS_FILES) if each is not None]
    checked = [each for each in classes if issubclass(each, Checked)]
    assert len(checked) > 100
    assert all(hints for each in checked for parameters, hints in _constructors(each) if parameters)
    # Records, a protocol, and a class that says more about wrong loaders than their type
    records = {"Client", "Visit", "Visiting", "Work", "Update", "Device", "Aggregation", "GivenLoaders"}
    others = {each for each in classes if each not in checked and each.__name__ not in records}
    nested = {Lora, Optimization, Completions, Sampling, Execution}
    lying = {Liars, PoisonedVotes, Backdoor}
    assert others == {Canaries, FewShot, Partition, SelfGenerationPrompts} | nested | lying
    assert all(dataclasses.is_dataclass(each) for each in others)
    assert Algorithm in checked


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: Partition("iid", num_clients=2.5), "num_clients=2.5"),
        (lambda: Canaries(words="ab"), "words='ab'"),
        (lambda: Holdout("topic", 3), "values=3"),
        (lambda: Excluded(3, "post", "post"), "source=3"),
        (lambda: InstructionPrompt(3, *["a"] * 4), "begin=3"),
        (lambda: FewShot("MiniLM"), "encoder='MiniLM'"),
        (lambda: Liars(clients="ann"), "clients='ann'"),
        (lambda: PoisonedVotes(liars="ann"), "liars='ann'"),
        (lambda: Backdoor("by the way", "No.", share="half"), "share='half'"),
        (lambda: PseudoLabels("MiniLM", 3), "encoder='MiniLM'"),
    ],
)
def test_fields_of_dataclasses_are_checked(make, word):
    with pytest.raises(ValueError, match=f"{word} must be"):
        make()
