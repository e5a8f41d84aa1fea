"""fedlight: federated fine-tuning of language models inside PyTorch Lightning.

What is listed here is the public interface, in the order in which a newcomer meets it: ``from fedlight import
FederatedLoop``. A name is looked up in its file when it is first asked for, so ``import fedlight`` loads neither torch nor
Lightning. In a config, ``class_path: fedlight.FedProx`` and the name alone mean the same class.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_FILES = {
    # A Lightning project of yours, federated: the loop, and whose example is whose.
    "FederatedLoop": "callbacks.federated_loop",
    "ByClient": "by_client",
    "FederatedWrapper": "datamodules.federated_wrapper",
    "FederatedDataModule": "datamodules.federated",
    "GivenLoaders": "datamodules.given_loaders",
    "PartitionByField": "datamodules.partition_by_field",
    "Partition": "datamodules.partition",
    "iid": "datamodules.partition",
    "dirichlet": "datamodules.partition",
    "by_key": "datamodules.partition",
    # What is shown and written on the way.
    "RoundProgress": "callbacks.progress",
    "VisitLog": "callbacks.visit_log",
    "GroupLog": "callbacks.group_log",
    "ClientAccuracy": "callbacks.client_accuracy",
    "AdapterExport": "callbacks.adapter_export",
    "PredictionWriter": "callbacks.prediction_writer",
    # What clients and server do.
    "FedAvg": "federation.algorithms.fedavg",
    "FedProx": "federation.algorithms.fedprox",
    "Scaffold": "federation.algorithms.scaffold",
    "FedBiscuit": "federation.algorithms.fedbiscuit",
    "FewFedPIT": "federation.algorithms.fewfedpit",
    "FedMIT": "federation.algorithms.fedmit",
    "FewFedWeight": "federation.algorithms.fewfedweight",
    "LocalOnly": "federation.algorithms.local_only",
    "LocalSelfGeneration": "federation.algorithms.local_self_generation",
    "Average": "federation.server",
    "FedAvgM": "federation.server",
    "FedAdagrad": "federation.server",
    "FedAdam": "federation.server",
    "FedYogi": "federation.server",
    "CoordinateMedian": "federation.aggregation",
    "TrimmedMean": "federation.aggregation",
    "PrivateMean": "federation.privacy",
    # What is sent, and on what it is trained.
    "Identity": "federation.channel",
    "Wire": "federation.wire",
    "Quantize": "federation.codecs",
    "TopK": "federation.codecs",
    "ClipAndNoise": "federation.privacy",
    "Fleet": "devices.fleet",
    "Device": "devices.device",
    # Language models: modules and their data.
    "SelectorModule": "modules.selector",
    "SFTModule": "modules.sft",
    "DPOModule": "modules.dpo",
    "RewardModule": "modules.reward",
    "ProjectorModule": "modules.projector",
    "PreferenceDataModule": "datamodules.preferences",
    "InstructionDataModule": "datamodules.instructions",
    "PromptDataModule": "datamodules.prompts",
    "CompletionPairDataModule": "datamodules.completions",
    "EmbeddingDataModule": "datamodules.embeddings",
    # What clients train on besides their own rows: retrieved, or made by themselves.
    "AugmentedInstructionDataModule": "datamodules.augmented",
    "RandomSampling": "augmentation.random_sampling",
    "DirectRetrieval": "augmentation.direct",
    "FedDCA": "augmentation.feddca",
    "FedDCAStar": "augmentation.feddca_star",
    "LESS": "augmentation.less",
    "SelfInstruct": "augmentation.self_instruct",
    "HashedEncoder": "datamodules.encoders",
    "SentenceEncoder": "datamodules.encoders",
    "SyntheticInstructionDataModule": "datamodules.synthetic",
    "SelfGeneration": "datamodules.self_generation",
    "PseudoResponses": "datamodules.pseudo_responses",
    "FewShot": "datamodules.few_shot",
    # How good it is.
    "WinRate": "callbacks.win_rate",
    "Judge": "evaluation.judge",
    "OracleJudge": "judges",
    "FactJudge": "fact_judge",
    "LengthJudge": "length_judge",
    "LocalJudge": "local_judge",
    "ChatJudge": "chat_judge",
    "SelectorJudge": "judges",
    "TaskScores": "callbacks.task_scores",
    "TaskDataModule": "datamodules.task_data",
    "GSM8K": "evaluation.tasks.gsm8k",
    "MultipleChoice": "evaluation.tasks.multiple_choice",
    "Sentiment": "evaluation.tasks.sentiment",
    "HumanEval": "evaluation.tasks.human_eval",
    "ExactMatch": "evaluation.tasks.exact_match",
    "DomainCoverage": "evaluation.coverage",
    # What leaks.
    "MemoryExtraction": "callbacks.memory_extraction",
    "DiscoverableMemorization": "callbacks.discoverable_memorization",
    "MembershipInference": "callbacks.membership_inference",
    "Canaries": "datamodules.canaries",
    # To write a part of one's own: what it derives from, and the words it is said in.
    "Algorithm": "federation.algorithm",
    "ServerOptimizer": "federation.server",
    "Aggregation": "federation.aggregation",
    "Channel": "federation.channel",
    "Codec": "federation.codecs",
    "Augmentation": "datamodules.augmentation",
    "Synthesis": "datamodules.synthesis",
    "Task": "evaluation.tasks.task",
    "Attack": "callbacks.attack",
    "Client": "federation.client",
    "Visit": "federation.client",
    "Work": "federation.client",
    "Update": "federation.client",
    "State": "federation.state",
    "derive_seed": "federation.seeding",
}

__all__ = ["__version__", *_FILES]


def __getattr__(name: str) -> Any:
    """Imports the file of a public name when the name is first asked for (PEP 562)."""
    if name not in _FILES:
        raise AttributeError(f"module 'fedlight' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"fedlight.{_FILES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_FILES})


if TYPE_CHECKING:  # the same names, for type checkers and editors
    from fedlight.augmentation.direct import DirectRetrieval as DirectRetrieval
    from fedlight.augmentation.feddca import FedDCA as FedDCA
    from fedlight.augmentation.feddca_star import FedDCAStar as FedDCAStar
    from fedlight.augmentation.less import LESS as LESS
    from fedlight.augmentation.random_sampling import RandomSampling as RandomSampling
    from fedlight.augmentation.self_instruct import SelfInstruct as SelfInstruct
    from fedlight.by_client import ByClient as ByClient
    from fedlight.callbacks.adapter_export import AdapterExport as AdapterExport
    from fedlight.callbacks.attack import Attack as Attack
    from fedlight.callbacks.client_accuracy import ClientAccuracy as ClientAccuracy
    from fedlight.callbacks.discoverable_memorization import (
        DiscoverableMemorization as DiscoverableMemorization,
    )
    from fedlight.callbacks.federated_loop import FederatedLoop as FederatedLoop
    from fedlight.callbacks.group_log import GroupLog as GroupLog
    from fedlight.callbacks.membership_inference import MembershipInference as MembershipInference
    from fedlight.callbacks.memory_extraction import MemoryExtraction as MemoryExtraction
    from fedlight.callbacks.prediction_writer import PredictionWriter as PredictionWriter
    from fedlight.callbacks.progress import RoundProgress as RoundProgress
    from fedlight.callbacks.task_scores import TaskScores as TaskScores
    from fedlight.callbacks.visit_log import VisitLog as VisitLog
    from fedlight.callbacks.win_rate import WinRate as WinRate
    from fedlight.chat_judge import ChatJudge as ChatJudge
    from fedlight.datamodules.augmentation import Augmentation as Augmentation
    from fedlight.datamodules.augmented import (
        AugmentedInstructionDataModule as AugmentedInstructionDataModule,
    )
    from fedlight.datamodules.canaries import Canaries as Canaries
    from fedlight.datamodules.completions import CompletionPairDataModule as CompletionPairDataModule
    from fedlight.datamodules.embeddings import EmbeddingDataModule as EmbeddingDataModule
    from fedlight.datamodules.encoders import HashedEncoder as HashedEncoder
    from fedlight.datamodules.encoders import SentenceEncoder as SentenceEncoder
    from fedlight.datamodules.federated import FederatedDataModule as FederatedDataModule
    from fedlight.datamodules.federated_wrapper import FederatedWrapper as FederatedWrapper
    from fedlight.datamodules.few_shot import FewShot as FewShot
    from fedlight.datamodules.given_loaders import GivenLoaders as GivenLoaders
    from fedlight.datamodules.instructions import InstructionDataModule as InstructionDataModule
    from fedlight.datamodules.partition import Partition as Partition
    from fedlight.datamodules.partition import by_key as by_key
    from fedlight.datamodules.partition import dirichlet as dirichlet
    from fedlight.datamodules.partition import iid as iid
    from fedlight.datamodules.partition_by_field import PartitionByField as PartitionByField
    from fedlight.datamodules.preferences import PreferenceDataModule as PreferenceDataModule
    from fedlight.datamodules.prompts import PromptDataModule as PromptDataModule
    from fedlight.datamodules.pseudo_responses import PseudoResponses as PseudoResponses
    from fedlight.datamodules.self_generation import SelfGeneration as SelfGeneration
    from fedlight.datamodules.synthesis import Synthesis as Synthesis
    from fedlight.datamodules.synthetic import (
        SyntheticInstructionDataModule as SyntheticInstructionDataModule,
    )
    from fedlight.datamodules.task_data import TaskDataModule as TaskDataModule
    from fedlight.devices.device import Device as Device
    from fedlight.devices.fleet import Fleet as Fleet
    from fedlight.evaluation.coverage import DomainCoverage as DomainCoverage
    from fedlight.evaluation.judge import Judge as Judge
    from fedlight.evaluation.tasks.exact_match import ExactMatch as ExactMatch
    from fedlight.evaluation.tasks.gsm8k import GSM8K as GSM8K
    from fedlight.evaluation.tasks.human_eval import HumanEval as HumanEval
    from fedlight.evaluation.tasks.multiple_choice import MultipleChoice as MultipleChoice
    from fedlight.evaluation.tasks.sentiment import Sentiment as Sentiment
    from fedlight.evaluation.tasks.task import Task as Task
    from fedlight.fact_judge import FactJudge as FactJudge
    from fedlight.federation.aggregation import Aggregation as Aggregation
    from fedlight.federation.aggregation import CoordinateMedian as CoordinateMedian
    from fedlight.federation.aggregation import TrimmedMean as TrimmedMean
    from fedlight.federation.algorithm import Algorithm as Algorithm
    from fedlight.federation.algorithms.fedavg import FedAvg as FedAvg
    from fedlight.federation.algorithms.fedbiscuit import FedBiscuit as FedBiscuit
    from fedlight.federation.algorithms.fedmit import FedMIT as FedMIT
    from fedlight.federation.algorithms.fedprox import FedProx as FedProx
    from fedlight.federation.algorithms.fewfedpit import FewFedPIT as FewFedPIT
    from fedlight.federation.algorithms.fewfedweight import FewFedWeight as FewFedWeight
    from fedlight.federation.algorithms.local_only import LocalOnly as LocalOnly
    from fedlight.federation.algorithms.local_self_generation import (
        LocalSelfGeneration as LocalSelfGeneration,
    )
    from fedlight.federation.algorithms.scaffold import Scaffold as Scaffold
    from fedlight.federation.channel import Channel as Channel
    from fedlight.federation.channel import Identity as Identity
    from fedlight.federation.client import Client as Client
    from fedlight.federation.client import Update as Update
    from fedlight.federation.client import Visit as Visit
    from fedlight.federation.client import Work as Work
    from fedlight.federation.codecs import Codec as Codec
    from fedlight.federation.codecs import Quantize as Quantize
    from fedlight.federation.codecs import TopK as TopK
    from fedlight.federation.privacy import ClipAndNoise as ClipAndNoise
    from fedlight.federation.privacy import PrivateMean as PrivateMean
    from fedlight.federation.seeding import derive_seed as derive_seed
    from fedlight.federation.server import Average as Average
    from fedlight.federation.server import FedAdagrad as FedAdagrad
    from fedlight.federation.server import FedAdam as FedAdam
    from fedlight.federation.server import FedAvgM as FedAvgM
    from fedlight.federation.server import FedYogi as FedYogi
    from fedlight.federation.server import ServerOptimizer as ServerOptimizer
    from fedlight.federation.state import State as State
    from fedlight.federation.wire import Wire as Wire
    from fedlight.judges import OracleJudge as OracleJudge
    from fedlight.judges import SelectorJudge as SelectorJudge
    from fedlight.length_judge import LengthJudge as LengthJudge
    from fedlight.local_judge import LocalJudge as LocalJudge
    from fedlight.modules.dpo import DPOModule as DPOModule
    from fedlight.modules.projector import ProjectorModule as ProjectorModule
    from fedlight.modules.reward import RewardModule as RewardModule
    from fedlight.modules.selector import SelectorModule as SelectorModule
    from fedlight.modules.sft import SFTModule as SFTModule
