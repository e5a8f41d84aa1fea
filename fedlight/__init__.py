"""fedlight: federated fine-tuning of language models inside PyTorch Lightning.

What is listed here is the public interface, in the order in which a newcomer meets it: ``from fedlight import
FederatedLoop``. A name is looked up in its file when it is first asked for, so ``import fedlight`` loads neither torch nor
Lightning. In a config, ``class_path: fedlight.FedProx`` and the name alone mean the same class.
"""

from typing import TYPE_CHECKING

from fedlight.support.lazy import lazy_names

__version__ = "0.1.0"

_FILES = {
    # A Lightning project of yours, federated: the loop, and whose example is whose.
    "FederatedLoop": "callbacks.loop.federated_loop",
    "ByClient": "datamodules.federated.by_client",
    "FederatedWrapper": "datamodules.federated.by_client",
    "FederatedDataModule": "datamodules.federated.datamodule",
    "GivenLoaders": "datamodules.federated.by_client",
    "ClientParallelStrategy": "processes.strategy",
    "PartitionByField": "datamodules.clients.partition",
    "Partition": "datamodules.clients.partition",
    "iid": "datamodules.clients.partition",
    "dirichlet": "datamodules.clients.partition",
    "by_key": "datamodules.clients.partition",
    # What is shown and written on the way.
    "RoundProgress": "callbacks.progress.round_progress",
    "VisitLog": "callbacks.logs.visit_log",
    "ClientData": "callbacks.logs.client_data",
    "GroupLog": "callbacks.logs.group_log",
    "ClientAccuracy": "callbacks.logs.client_accuracy",
    "AdapterExport": "callbacks.export.adapter_export",
    "PredictionWriter": "callbacks.export.prediction_writer",
    # What clients and server do.
    "FedAvg": "federation.algorithms.fedavg",
    "FedProx": "federation.algorithms.fedprox",
    "Scaffold": "federation.algorithms.scaffold",
    "FedBiscuit": "federation.algorithms.fedbiscuit",
    "GreedyGroups": "federation.algorithms.fedbiscuit",
    "OptimalGroups": "federation.algorithms.assignments",
    "NearestGroups": "federation.algorithms.assignments",
    "SoftGroups": "federation.algorithms.assignments",
    "KnownGroups": "federation.algorithms.assignments",
    "FedKSeed": "federation.forward.fedkseed",
    "FewFedPIT": "federation.algorithms.self_made.fewfedpit",
    "FedMIT": "federation.algorithms.self_made.fedmit",
    "FewFedWeight": "federation.algorithms.self_made.fewfedweight",
    "Ditto": "federation.algorithms.ditto",
    "FedRep": "federation.algorithms.fedrep",
    "GlobalThenLocal": "federation.algorithms.global_then_local",
    "FFALoRA": "federation.algorithms.lora.ffa_lora",
    "RoLoRA": "federation.algorithms.lora.ro_lora",
    "FedSALoRA": "federation.algorithms.lora.fedsa_lora",
    "ProductAverage": "federation.algorithms.lora.product_average",
    "HetLoRA": "federation.algorithms.lora.hetlora",
    "FlexLoRA": "federation.algorithms.lora.flexlora",
    "LocalOnly": "federation.algorithms.local_only",
    "LocalSelfGeneration": "federation.algorithms.self_made.local_self_generation",
    "ZerothOrder": "federation.forward.zeroth_order",
    "FedBuff": "federation.asynchronous.fedbuff",
    "Part": "callbacks.loop.parts.part",
    "ProductError": "callbacks.loop.parts.product_error",
    "StepSchedules": "callbacks.loop.parts.optimizers",
    "Limits": "callbacks.loop.parts.limits",
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
    "Wire": "federation.channel",
    "Quantize": "federation.codecs",
    "TopK": "federation.codecs",
    "ClipAndNoise": "federation.privacy",
    "Fleet": "devices.fleet",
    "Device": "devices.device",
    # Language models: modules and their data.
    "SelectorModule": "modules.selector",
    "FeatureSelectorModule": "modules.feature_selector",
    "SFTModule": "modules.sft",
    "DPOModule": "modules.dpo",
    "RewardModule": "modules.reward",
    "ProjectorModule": "modules.projector",
    "PreferenceDataModule": "datamodules.preferences.datamodule",
    "InstructionDataModule": "datamodules.instructions.datamodule",
    "PromptDataModule": "datamodules.preferences.prompts",
    "CompletionPairDataModule": "datamodules.preferences.completions",
    "EmbeddingDataModule": "datamodules.instructions.embeddings",
    # What clients train on besides their own rows: retrieved, or made by themselves.
    "AugmentedInstructionDataModule": "datamodules.instructions.augmented",
    "RandomSampling": "augmentation.random_sampling",
    "DirectRetrieval": "augmentation.direct",
    "FedDCA": "augmentation.feddca",
    "FedDCAStar": "augmentation.feddca_star",
    "LESS": "augmentation.less.less",
    "SelfInstruct": "augmentation.self_instruct.self_instruct",
    "HashedEncoder": "datamodules.vectors.encoders",
    "SentenceEncoder": "datamodules.vectors.encoders",
    "SyntheticInstructionDataModule": "datamodules.synthesis.datamodule",
    "SelfGeneration": "datamodules.synthesis.self_generation",
    "SelfGenerationPrompts": "datamodules.synthesis.prompts",
    "PseudoResponses": "datamodules.synthesis.pseudo_responses",
    "SubstituteRows": "datamodules.synthesis.substitute_rows",
    "FewShot": "datamodules.clients.few_shot",
    # How good it is.
    "WinRate": "callbacks.scores.win_rate",
    "Judge": "evaluation.judge",
    "OracleJudge": "judges.rule_judges",
    "FactJudge": "judges.rule_judges",
    "LengthJudge": "judges.rule_judges",
    "LocalJudge": "judges.local_judge",
    "ChatEndpoint": "generators.endpoint",
    "LocalGenerator": "generators.local_generator",
    "ToyTeacher": "generators.toy_teacher",
    "ChatJudge": "judges.chat_judge",
    "SelectorJudge": "judges.selector_judge",
    "SampleAnswers": "callbacks.scores.sample_answers",
    "Forgetting": "callbacks.scores.forgetting",
    "TaskScores": "callbacks.scores.task_scores",
    "TaskDataModule": "datamodules.instructions.task_data",
    "TaskRows": "datamodules.rows.task_rows",
    "GSM8K": "evaluation.tasks.gsm8k",
    "MultipleChoice": "evaluation.tasks.multiple_choice",
    "Sentiment": "evaluation.tasks.sentiment",
    "HumanEval": "evaluation.tasks.human_eval",
    "ExactMatch": "evaluation.tasks.exact_match",
    "DomainCoverage": "evaluation.coverage",
    # What leaks.
    "MemoryExtraction": "callbacks.attacks.memory_extraction",
    "DiscoverableMemorization": "callbacks.attacks.discoverable_memorization",
    "MembershipInference": "callbacks.attacks.membership_inference",
    "Canaries": "datamodules.rows.canaries",
    # To write a part of one's own: what it derives from, and the words it is said in.
    "Algorithm": "federation.algorithm",
    "ServerOptimizer": "federation.server",
    "Aggregation": "federation.aggregation",
    "Channel": "federation.channel",
    "Codec": "federation.codecs",
    "Augmentation": "datamodules.instructions.augmentation",
    "Synthesis": "datamodules.synthesis.synthesis",
    "Task": "evaluation.tasks.task",
    "Attack": "callbacks.attacks.attack",
    "Client": "federation.client",
    "Visit": "federation.client",
    "Visiting": "federation.client",
    "Work": "federation.client",
    "Update": "federation.client",
    "State": "federation.state",
    "derive_seed": "support.seeding",
}

__all__ = ["__version__", *_FILES]


__getattr__ = lazy_names(__name__, _FILES)


def __dir__() -> list[str]:
    return sorted({*globals(), *_FILES})


if TYPE_CHECKING:  # the same names, for type checkers and editors
    from fedlight.augmentation.direct import DirectRetrieval as DirectRetrieval
    from fedlight.augmentation.feddca import FedDCA as FedDCA
    from fedlight.augmentation.feddca_star import FedDCAStar as FedDCAStar
    from fedlight.augmentation.less.less import LESS as LESS
    from fedlight.augmentation.random_sampling import RandomSampling as RandomSampling
    from fedlight.augmentation.self_instruct.self_instruct import SelfInstruct as SelfInstruct
    from fedlight.callbacks.attacks.attack import Attack as Attack
    from fedlight.callbacks.attacks.discoverable_memorization import (
        DiscoverableMemorization as DiscoverableMemorization,
    )
    from fedlight.callbacks.attacks.membership_inference import MembershipInference as MembershipInference
    from fedlight.callbacks.attacks.memory_extraction import MemoryExtraction as MemoryExtraction
    from fedlight.callbacks.export.adapter_export import AdapterExport as AdapterExport
    from fedlight.callbacks.export.prediction_writer import PredictionWriter as PredictionWriter
    from fedlight.callbacks.logs.client_accuracy import ClientAccuracy as ClientAccuracy
    from fedlight.callbacks.logs.client_data import ClientData as ClientData
    from fedlight.callbacks.logs.group_log import GroupLog as GroupLog
    from fedlight.callbacks.logs.visit_log import VisitLog as VisitLog
    from fedlight.callbacks.loop.federated_loop import FederatedLoop as FederatedLoop
    from fedlight.callbacks.loop.parts.limits import Limits as Limits
    from fedlight.callbacks.loop.parts.optimizers import StepSchedules as StepSchedules
    from fedlight.callbacks.loop.parts.part import Part as Part
    from fedlight.callbacks.loop.parts.product_error import ProductError as ProductError
    from fedlight.callbacks.progress.round_progress import RoundProgress as RoundProgress
    from fedlight.callbacks.scores.forgetting import Forgetting as Forgetting
    from fedlight.callbacks.scores.sample_answers import SampleAnswers as SampleAnswers
    from fedlight.callbacks.scores.task_scores import TaskScores as TaskScores
    from fedlight.callbacks.scores.win_rate import WinRate as WinRate
    from fedlight.datamodules.clients.few_shot import FewShot as FewShot
    from fedlight.datamodules.clients.partition import Partition as Partition
    from fedlight.datamodules.clients.partition import PartitionByField as PartitionByField
    from fedlight.datamodules.clients.partition import by_key as by_key
    from fedlight.datamodules.clients.partition import dirichlet as dirichlet
    from fedlight.datamodules.clients.partition import iid as iid
    from fedlight.datamodules.federated.by_client import ByClient as ByClient
    from fedlight.datamodules.federated.by_client import FederatedWrapper as FederatedWrapper
    from fedlight.datamodules.federated.by_client import GivenLoaders as GivenLoaders
    from fedlight.datamodules.federated.datamodule import FederatedDataModule as FederatedDataModule
    from fedlight.datamodules.instructions.augmentation import Augmentation as Augmentation
    from fedlight.datamodules.instructions.augmented import (
        AugmentedInstructionDataModule as AugmentedInstructionDataModule,
    )
    from fedlight.datamodules.instructions.datamodule import InstructionDataModule as InstructionDataModule
    from fedlight.datamodules.instructions.embeddings import EmbeddingDataModule as EmbeddingDataModule
    from fedlight.datamodules.instructions.task_data import TaskDataModule as TaskDataModule
    from fedlight.datamodules.preferences.completions import (
        CompletionPairDataModule as CompletionPairDataModule,
    )
    from fedlight.datamodules.preferences.datamodule import PreferenceDataModule as PreferenceDataModule
    from fedlight.datamodules.preferences.prompts import PromptDataModule as PromptDataModule
    from fedlight.datamodules.rows.canaries import Canaries as Canaries
    from fedlight.datamodules.rows.task_rows import TaskRows as TaskRows
    from fedlight.datamodules.synthesis.datamodule import (
        SyntheticInstructionDataModule as SyntheticInstructionDataModule,
    )
    from fedlight.datamodules.synthesis.prompts import SelfGenerationPrompts as SelfGenerationPrompts
    from fedlight.datamodules.synthesis.pseudo_responses import PseudoResponses as PseudoResponses
    from fedlight.datamodules.synthesis.self_generation import SelfGeneration as SelfGeneration
    from fedlight.datamodules.synthesis.substitute_rows import SubstituteRows as SubstituteRows
    from fedlight.datamodules.synthesis.synthesis import Synthesis as Synthesis
    from fedlight.datamodules.vectors.encoders import HashedEncoder as HashedEncoder
    from fedlight.datamodules.vectors.encoders import SentenceEncoder as SentenceEncoder
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
    from fedlight.federation.aggregation import Aggregation as Aggregation
    from fedlight.federation.aggregation import CoordinateMedian as CoordinateMedian
    from fedlight.federation.aggregation import TrimmedMean as TrimmedMean
    from fedlight.federation.algorithm import Algorithm as Algorithm
    from fedlight.federation.algorithms.assignments import KnownGroups as KnownGroups
    from fedlight.federation.algorithms.assignments import NearestGroups as NearestGroups
    from fedlight.federation.algorithms.assignments import OptimalGroups as OptimalGroups
    from fedlight.federation.algorithms.assignments import SoftGroups as SoftGroups
    from fedlight.federation.algorithms.ditto import Ditto as Ditto
    from fedlight.federation.algorithms.fedavg import FedAvg as FedAvg
    from fedlight.federation.algorithms.fedbiscuit import FedBiscuit as FedBiscuit
    from fedlight.federation.algorithms.fedbiscuit import GreedyGroups as GreedyGroups
    from fedlight.federation.algorithms.fedprox import FedProx as FedProx
    from fedlight.federation.algorithms.fedrep import FedRep as FedRep
    from fedlight.federation.algorithms.global_then_local import GlobalThenLocal as GlobalThenLocal
    from fedlight.federation.algorithms.local_only import LocalOnly as LocalOnly
    from fedlight.federation.algorithms.lora.fedsa_lora import FedSALoRA as FedSALoRA
    from fedlight.federation.algorithms.lora.ffa_lora import FFALoRA as FFALoRA
    from fedlight.federation.algorithms.lora.flexlora import FlexLoRA as FlexLoRA
    from fedlight.federation.algorithms.lora.hetlora import HetLoRA as HetLoRA
    from fedlight.federation.algorithms.lora.product_average import ProductAverage as ProductAverage
    from fedlight.federation.algorithms.lora.ro_lora import RoLoRA as RoLoRA
    from fedlight.federation.algorithms.scaffold import Scaffold as Scaffold
    from fedlight.federation.algorithms.self_made.fedmit import FedMIT as FedMIT
    from fedlight.federation.algorithms.self_made.fewfedpit import FewFedPIT as FewFedPIT
    from fedlight.federation.algorithms.self_made.fewfedweight import FewFedWeight as FewFedWeight
    from fedlight.federation.algorithms.self_made.local_self_generation import (
        LocalSelfGeneration as LocalSelfGeneration,
    )
    from fedlight.federation.asynchronous.fedbuff import FedBuff as FedBuff
    from fedlight.federation.channel import Channel as Channel
    from fedlight.federation.channel import Identity as Identity
    from fedlight.federation.channel import Wire as Wire
    from fedlight.federation.client import Client as Client
    from fedlight.federation.client import Update as Update
    from fedlight.federation.client import Visit as Visit
    from fedlight.federation.client import Visiting as Visiting
    from fedlight.federation.client import Work as Work
    from fedlight.federation.codecs import Codec as Codec
    from fedlight.federation.codecs import Quantize as Quantize
    from fedlight.federation.codecs import TopK as TopK
    from fedlight.federation.forward.fedkseed import FedKSeed as FedKSeed
    from fedlight.federation.forward.zeroth_order import ZerothOrder as ZerothOrder
    from fedlight.federation.privacy import ClipAndNoise as ClipAndNoise
    from fedlight.federation.privacy import PrivateMean as PrivateMean
    from fedlight.federation.server import Average as Average
    from fedlight.federation.server import FedAdagrad as FedAdagrad
    from fedlight.federation.server import FedAdam as FedAdam
    from fedlight.federation.server import FedAvgM as FedAvgM
    from fedlight.federation.server import FedYogi as FedYogi
    from fedlight.federation.server import ServerOptimizer as ServerOptimizer
    from fedlight.federation.state import State as State
    from fedlight.generators.endpoint import ChatEndpoint as ChatEndpoint
    from fedlight.generators.local_generator import LocalGenerator as LocalGenerator
    from fedlight.generators.toy_teacher import ToyTeacher as ToyTeacher
    from fedlight.judges.chat_judge import ChatJudge as ChatJudge
    from fedlight.judges.local_judge import LocalJudge as LocalJudge
    from fedlight.judges.rule_judges import FactJudge as FactJudge
    from fedlight.judges.rule_judges import LengthJudge as LengthJudge
    from fedlight.judges.rule_judges import OracleJudge as OracleJudge
    from fedlight.judges.selector_judge import SelectorJudge as SelectorJudge
    from fedlight.modules.dpo import DPOModule as DPOModule
    from fedlight.modules.feature_selector import FeatureSelectorModule as FeatureSelectorModule
    from fedlight.modules.projector import ProjectorModule as ProjectorModule
    from fedlight.modules.reward import RewardModule as RewardModule
    from fedlight.modules.selector import SelectorModule as SelectorModule
    from fedlight.modules.sft import SFTModule as SFTModule
    from fedlight.processes.strategy import ClientParallelStrategy as ClientParallelStrategy
    from fedlight.support.seeding import derive_seed as derive_seed
