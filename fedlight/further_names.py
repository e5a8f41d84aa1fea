"""Names beside those of `fedlight` itself: a config gives each alone, and Python imports it from its room.

A config has ``class_path: FedKSeed``; Python has ``from fedlight.federation.forward import FedKSeed``.
"""

# fmt: off
FURTHER = {
    "GivenLoaders": "datamodules.federated.by_client", "ClientData": "callbacks.logs.client_data",
    "GroupLog": "callbacks.logs.group_log", "ClientAccuracy": "callbacks.logs.client_accuracy",
    "PredictionWriter": "callbacks.export.prediction_writer", "GreedyGroups": "federation.algorithms.fedbiscuit",
    "OptimalGroups": "federation.algorithms.assignments", "NearestGroups": "federation.algorithms.assignments",
    "SoftGroups": "federation.algorithms.assignments", "KnownGroups": "federation.algorithms.assignments",
    "FedKSeed": "federation.forward.fedkseed", "FedMIT": "federation.algorithms.self_made.fedmit",
    "FewFedWeight": "federation.algorithms.self_made.fewfedweight", "FedRep": "federation.algorithms.fedrep",
    "GlobalThenLocal": "federation.algorithms.global_then_local", "FFALoRA": "federation.algorithms.lora.ffa_lora",
    "RoLoRA": "federation.algorithms.lora.ro_lora", "FedSALoRA": "federation.algorithms.lora.fedsa_lora",
    "ProductAverage": "federation.algorithms.lora.product_average", "HetLoRA": "federation.algorithms.lora.hetlora",
    "FlexLoRA": "federation.algorithms.lora.flexlora",
    "LocalSelfGeneration": "federation.algorithms.self_made.local_self_generation",
    "ZerothOrder": "federation.forward.zeroth_order", "FedBuff": "federation.asynchronous.fedbuff",
    "Krum": "federation.byzantine.whole_updates", "Bulyan": "federation.byzantine.whole_updates",
    "GeometricMedian": "federation.byzantine.whole_updates", "Liars": "federation.byzantine.liars",
    "Malicious": "callbacks.loop.parts.malicious", "BackdoorSuccess": "callbacks.attacks.backdoor_success",
    "PoisonedVotes": "datamodules.rows.poison", "Backdoor": "datamodules.rows.poison",
    "ProductError": "callbacks.loop.parts.product_error", "StepSchedules": "callbacks.loop.parts.optimizers",
    "AveragedBuffers": "callbacks.loop.parts.buffers", "LocalBuffers": "callbacks.loop.parts.buffers",
    "Average": "federation.algorithm", "FedAdagrad": "federation.server", "FedYogi": "federation.server",
    "Identity": "federation.client", "Device": "devices.device", "Completions": "evaluation.tasks.sampling",
    "Execution": "modules.language.base_model", "ProjectorModule": "modules.projector",
    "CompletionPairDataModule": "datamodules.preferences.completions",
    "EmbeddingDataModule": "datamodules.instructions.embeddings", "RandomSampling": "augmentation.random_sampling",
    "DirectRetrieval": "augmentation.direct", "SelfInstruct": "augmentation.self_instruct.self_instruct",
    "SelfGenerationPrompts": "datamodules.synthesis.prompts",
    "PseudoResponses": "datamodules.synthesis.pseudo_responses",
    "SubstituteRows": "datamodules.synthesis.substitute_rows", "FewShot": "datamodules.clients.few_shot",
    "OracleJudge": "judges.rule_judges", "FactJudge": "judges.rule_judges", "LengthJudge": "judges.rule_judges",
    "LocalJudge": "judges.local_judge", "ChatEndpoint": "generators.endpoint",
    "LocalGenerator": "generators.local_generator", "ToyTeacher": "generators.toy_teacher",
    "ChatJudge": "judges.chat_judge", "SelectorJudge": "judges.selector_judge",
    "SampleAnswers": "callbacks.scores.sample_answers", "Forgetting": "callbacks.scores.forgetting",
    "TaskDataModule": "datamodules.instructions.task_data", "TaskRows": "datamodules.rows.task_rows",
    "GSM8K": "evaluation.tasks.gsm8k", "MultipleChoice": "evaluation.tasks.multiple_choice",
    "Sentiment": "evaluation.tasks.sentiment", "HumanEval": "evaluation.tasks.human_eval",
    "ExactMatch": "evaluation.tasks.exact_match", "DomainCoverage": "evaluation.coverage",
    "MemoryExtraction": "callbacks.attacks.memory_extraction",
    "ClientExtraction": "callbacks.attacks.client_extraction",
    "DiscoverableMemorization": "callbacks.attacks.discoverable_memorization",
    "MembershipInference": "callbacks.attacks.membership_inference", "Canaries": "datamodules.rows.canaries",
    "Channel": "federation.client", "Augmentation": "datamodules.instructions.augmentation",
    "Synthesis": "datamodules.synthesis.synthesis", "Task": "evaluation.tasks.task",
    "Attack": "callbacks.attacks.attack",
}
# fmt: on
"""Name -> file below ``fedlight``; the file's folder is the room."""
