"""fedlight: federated fine-tuning of language models inside PyTorch Lightning.

The names here are the public interface, in the order that suits a newcomer: ``from fedlight import FederatedLoop``. A name
is looked up in its file when it is first asked for, so ``import fedlight`` loads neither torch nor Lightning. A config gives
the name of a class alone, ``class_path: FedProx``, also of those in `further_names`.
"""

from typing import TYPE_CHECKING

from fedlight.further_names import FURTHER
from fedlight.support.lazy import lazy_names

__version__ = "0.1.0"

_FILES = {
    # A Lightning project of yours, federated: the loop, and whose example is whose.
    "FederatedLoop": "callbacks.loop.federated_loop",
    "ByClient": "datamodules.federated.by_client",
    "FederatedWrapper": "datamodules.federated.by_client",
    "FederatedDataModule": "datamodules.federated.datamodule",
    "ClientParallelStrategy": "processes.strategy",
    "PartitionByField": "datamodules.clients.partition",
    "Partition": "datamodules.clients.partition",
    "iid": "datamodules.clients.partition",
    "dirichlet": "datamodules.clients.partition",
    "by_key": "datamodules.clients.partition",
    # Progress, logs and the result.
    "RoundProgress": "callbacks.progress.round_progress",
    "VisitLog": "callbacks.logs.visit_log",
    "AdapterExport": "callbacks.export.adapter_export",
    # The work of clients and server.
    "FedAvg": "federation.algorithms.fedavg",
    "FedProx": "federation.algorithms.fedprox",
    "Scaffold": "federation.algorithms.scaffold",
    "FedBiscuit": "federation.algorithms.fedbiscuit",
    "FewFedPIT": "federation.algorithms.self_made.fewfedpit",
    "Ditto": "federation.algorithms.ditto",
    "LocalOnly": "federation.algorithms.local_only",
    "Part": "callbacks.loop.parts.part",
    "Limits": "callbacks.loop.parts.limits",
    "FedAvgM": "federation.server",
    "FedAdam": "federation.server",
    "CoordinateMedian": "federation.aggregation",
    "TrimmedMean": "federation.aggregation",
    "PrivateMean": "federation.privacy",
    # The wire, and the devices that train.
    "Wire": "federation.channel",
    "Quantize": "federation.codecs",
    "TopK": "federation.codecs",
    "ClipAndNoise": "federation.privacy",
    "Fleet": "devices.fleet",
    # Language models: modules and their data.
    "SelectorModule": "modules.selector",
    "FeatureSelectorModule": "modules.feature_selector",
    "SFTModule": "modules.sft",
    "DPOModule": "modules.dpo",
    "RewardModule": "modules.reward",
    "Lora": "modules.language.adapters",
    "Optimization": "modules.language.optimizers",
    "Sampling": "evaluation.tasks.sampling",
    "PreferenceDataModule": "datamodules.preferences.datamodule",
    "InstructionDataModule": "datamodules.instructions.datamodule",
    "PromptDataModule": "datamodules.preferences.prompts",
    # Rows of clients besides their own: retrieved, or made by themselves.
    "AugmentedInstructionDataModule": "datamodules.instructions.augmented",
    "FedDCA": "augmentation.feddca",
    "FedDCAStar": "augmentation.feddca_star",
    "LESS": "augmentation.less.less",
    "HashedEncoder": "datamodules.vectors.encoders",
    "SentenceEncoder": "datamodules.vectors.encoders",
    "SyntheticInstructionDataModule": "datamodules.synthesis.datamodule",
    "SelfGeneration": "datamodules.synthesis.self_generation",
    # How good it is.
    "WinRate": "callbacks.scores.win_rate",
    "Judge": "evaluation.judge",
    "TaskScores": "callbacks.scores.task_scores",
    # For new parts: their base classes, and the types that these use.
    "Algorithm": "federation.algorithm",
    "ServerOptimizer": "federation.algorithm",
    "Aggregation": "federation.algorithm",
    "Codec": "federation.codecs",
    "Client": "federation.client",
    "Visit": "federation.client",
    "Visiting": "federation.client",
    "Work": "federation.client",
    "Update": "federation.client",
    "State": "federation.client",
    "derive_seed": "support.seeding",
}

__all__ = ["__version__", *_FILES]
__getattr__ = lazy_names(__name__, _FILES, FURTHER)


def __dir__() -> list[str]:
    return sorted({*globals(), *_FILES})


if TYPE_CHECKING:  # the same names, for type checkers and editors
    from fedlight.augmentation.feddca import FedDCA as FedDCA
    from fedlight.augmentation.feddca_star import FedDCAStar as FedDCAStar
    from fedlight.augmentation.less.less import LESS as LESS
    from fedlight.callbacks.export.adapter_export import AdapterExport as AdapterExport
    from fedlight.callbacks.logs.visit_log import VisitLog as VisitLog
    from fedlight.callbacks.loop.federated_loop import FederatedLoop as FederatedLoop
    from fedlight.callbacks.loop.parts.limits import Limits as Limits
    from fedlight.callbacks.loop.parts.part import Part as Part
    from fedlight.callbacks.progress.round_progress import RoundProgress as RoundProgress
    from fedlight.callbacks.scores.task_scores import TaskScores as TaskScores
    from fedlight.callbacks.scores.win_rate import WinRate as WinRate
    from fedlight.datamodules.clients.partition import Partition as Partition
    from fedlight.datamodules.clients.partition import PartitionByField as PartitionByField
    from fedlight.datamodules.clients.partition import by_key as by_key
    from fedlight.datamodules.clients.partition import dirichlet as dirichlet
    from fedlight.datamodules.clients.partition import iid as iid
    from fedlight.datamodules.federated.by_client import ByClient as ByClient
    from fedlight.datamodules.federated.by_client import FederatedWrapper as FederatedWrapper
    from fedlight.datamodules.federated.datamodule import FederatedDataModule as FederatedDataModule
    from fedlight.datamodules.instructions.augmented import (
        AugmentedInstructionDataModule as AugmentedInstructionDataModule,
    )
    from fedlight.datamodules.instructions.datamodule import InstructionDataModule as InstructionDataModule
    from fedlight.datamodules.preferences.datamodule import PreferenceDataModule as PreferenceDataModule
    from fedlight.datamodules.preferences.prompts import PromptDataModule as PromptDataModule
    from fedlight.datamodules.synthesis.datamodule import (
        SyntheticInstructionDataModule as SyntheticInstructionDataModule,
    )
    from fedlight.datamodules.synthesis.self_generation import SelfGeneration as SelfGeneration
    from fedlight.datamodules.vectors.encoders import HashedEncoder as HashedEncoder
    from fedlight.datamodules.vectors.encoders import SentenceEncoder as SentenceEncoder
    from fedlight.devices.fleet import Fleet as Fleet
    from fedlight.evaluation.judge import Judge as Judge
    from fedlight.evaluation.tasks.sampling import Sampling as Sampling
    from fedlight.federation.aggregation import CoordinateMedian as CoordinateMedian
    from fedlight.federation.aggregation import TrimmedMean as TrimmedMean
    from fedlight.federation.algorithm import Aggregation as Aggregation
    from fedlight.federation.algorithm import Algorithm as Algorithm
    from fedlight.federation.algorithm import ServerOptimizer as ServerOptimizer
    from fedlight.federation.algorithms.ditto import Ditto as Ditto
    from fedlight.federation.algorithms.fedavg import FedAvg as FedAvg
    from fedlight.federation.algorithms.fedbiscuit import FedBiscuit as FedBiscuit
    from fedlight.federation.algorithms.fedprox import FedProx as FedProx
    from fedlight.federation.algorithms.local_only import LocalOnly as LocalOnly
    from fedlight.federation.algorithms.scaffold import Scaffold as Scaffold
    from fedlight.federation.algorithms.self_made.fewfedpit import FewFedPIT as FewFedPIT
    from fedlight.federation.channel import Wire as Wire
    from fedlight.federation.client import Client as Client
    from fedlight.federation.client import State as State
    from fedlight.federation.client import Update as Update
    from fedlight.federation.client import Visit as Visit
    from fedlight.federation.client import Visiting as Visiting
    from fedlight.federation.client import Work as Work
    from fedlight.federation.codecs import Codec as Codec
    from fedlight.federation.codecs import Quantize as Quantize
    from fedlight.federation.codecs import TopK as TopK
    from fedlight.federation.privacy import ClipAndNoise as ClipAndNoise
    from fedlight.federation.privacy import PrivateMean as PrivateMean
    from fedlight.federation.server import FedAdam as FedAdam
    from fedlight.federation.server import FedAvgM as FedAvgM
    from fedlight.modules.dpo import DPOModule as DPOModule
    from fedlight.modules.feature_selector import FeatureSelectorModule as FeatureSelectorModule
    from fedlight.modules.language.adapters import Lora as Lora
    from fedlight.modules.language.optimizers import Optimization as Optimization
    from fedlight.modules.reward import RewardModule as RewardModule
    from fedlight.modules.selector import SelectorModule as SelectorModule
    from fedlight.modules.sft import SFTModule as SFTModule
    from fedlight.processes.strategy import ClientParallelStrategy as ClientParallelStrategy
    from fedlight.support.seeding import derive_seed as derive_seed
