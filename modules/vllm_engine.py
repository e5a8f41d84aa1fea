"""Completions by vLLM, which serves the plain base once and the LoRA adapters of several clients in one batch.

W. Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", SOSP 2023,
https://arxiv.org/abs/2309.06180. Written against the interface of vLLM 0.33.0.
"""

import hashlib
import importlib.util
import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedlight.modules.language.adapter_folders import WEIGHTS
from fedlight.modules.language.generation import Job
from fedlight.modules.language.streams import own_stream
from fedlight.pretrained.hub import find_model
from fedlight.stacking.client_models import CLIENTS_TOGETHER
from fedlight.support.seeding import derive_seed

MISSING = "the setting vllm generates with vLLM: pip install 'fedlight[vllm]', or leave vllm out"
DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
"""Number types of vLLM's kernels for LoRA."""
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM takes as ``max_lora_rank``."""
TEMPERATURES = (0.01, 2.0)
"""Temperatures besides 0: vLLM raises lower ones to 0.01 with a warning, and refuses higher ones."""
OWN_ARGUMENTS = {
    "model": "model",
    "dtype": "dtype",
    "trust_remote_code": "trust_remote_code",
    "quantization": "base",
    "enable_lora": "adapter",
    "max_lora_rank": "lora.rank",
    "generation_config": "completions",
}
"""Arguments of ``vllm.LLM`` that follow from a setting of the module."""


def check_settings(options: Any) -> None:
    """Check the settings of a module with ``vllm``; nothing is imported.

    Raises:
        ValueError: ``vllm`` has an argument that follows from another setting, or the base is not the one in its folder.
    """
    for name, setting in OWN_ARGUMENTS.items():
        if name in options.execution["vllm"]:
            raise ValueError(
                f"vllm: {name}={options.execution['vllm'][name]!r} follows from the module's {setting}: leave it out"
            )
    if options.base != "plain":
        raise ValueError(
            f"vllm with base={options.base!r}: vLLM rounds weights otherwise than bitsandbytes here, so it serves plain "
            "bases alone: set base to plain, or leave vllm out"
        )
    if options.dtype == "fp32":
        raise ValueError(_explain_dtype("fp32"))
    if options.merge_adapter:
        raise ValueError(
            "vllm with merge_adapter=true: the merged weights are in no folder that vLLM could read: save them with "
            "save_merged and give the folder as model, or leave vllm out"
        )
    _check_temperature(options.completions["temperature"])


def check_network(network: Any) -> None:
    """Check that vLLM is installed and can serve a loaded model with its adapters.

    Raises:
        ModuleNotFoundError: vLLM is not installed.
        ValueError: vLLM has no LoRA for the base's number type, or more than LoRA is trained.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ModuleNotFoundError(MISSING)
    if network.dtype not in DTYPES:
        raise ValueError(_explain_dtype(str(network.dtype).removeprefix("torch.")))
    _find_max_rank(network)
    for name, weight in network.named_parameters():
        if weight.requires_grad and not {"lora_A", "lora_B"} & set(name.split(".")):
            raise ValueError(
                f"vllm: {name} is trained, but vLLM takes LoRA's A and B alone from a client: train these alone, or leave "
                "vllm out"
            )


def _find_max_rank(network: Any) -> int:
    """Return the least ``max_lora_rank`` of vLLM for all adapters; raise ValueError where there is none."""
    configs = network.peft_config.values()
    rank = max(r for config in configs for r in (config.r, *(config.rank_pattern or {}).values()))
    if rank > RANKS[-1]:
        raise ValueError(f"vllm with rank {rank} of LoRA: vLLM takes at most {RANKS[-1]}: lower lora.rank")
    return next(known for known in RANKS if known >= rank)


def _explain_dtype(dtype: str) -> str:
    return f"vllm with a base in {dtype}: vLLM computes LoRA in bf16 or fp16: set dtype to bf16, or leave vllm out"


class VLLMEngine:
    """vLLM with one base for any number of adapters; it is started by the first job and ends with the object.

    Adapters are written into a private temporary folder. Files that a job no longer uses are removed.

    Args:
        options: settings of a `LanguageModule`, whose ``vllm`` has further arguments of ``vllm.LLM``.
    """

    def __init__(self, options: Any) -> None:
        self._options = options
        self._llm: Any = None
        self._folder = Path(tempfile.mkdtemp(prefix="fedlight-vllm-"))
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)  # at exit, too
        self._kept: dict[str | None, Any] = {}  # digest of weights -> vLLM's request for them
        self._num_adapters = 0

    def write(self, network: Any, states: Sequence[Mapping[str, Tensor] | None], job: Job) -> list[list[int]]:
        """Return the new tokens of each copy of each prompt, in order.

        Args:
            network: PEFT model whose base vLLM reads from its folder.
            states: of each request the weights that differ from the network's, by the module's names; None: without adapter.
            job: prompts of all requests. The draws of a prompt depend on its request's seed and its place there.

        Raises:
            ValueError: a setting or the model's present state has no counterpart in vLLM.
        """
        _check_temperature(job.temperature)
        _check_base(network)
        self._start(network)
        digests = [
            self._keep(network, state) if state is not None and count else None
            for state, count in zip(states, job.counts, strict=True)
        ]
        answers = self._llm.generate(
            [{"prompt_token_ids": row} for row in job.rows],
            _sampling(job),
            use_tqdm=False,
            lora_request=[
                self._kept.get(digest)
                for digest, count in zip(digests, job.counts, strict=True)
                for _ in range(count)
            ],
        )
        for digest in self._kept.keys() - {*digests}:
            shutil.rmtree(self._kept.pop(digest).lora_path)
        return [list(output.token_ids) for answer in answers for output in answer.outputs]

    def _start(self, network: Any) -> None:
        if self._llm is not None:
            return
        from vllm import LLM

        device, options = network.device, self._options
        if device.index:
            raise ValueError(
                f"vllm: the module is on {device}, but vLLM computes on the first visible GPU: start this process with "
                f"CUDA_VISIBLE_DEVICES={device.index}, or leave vllm out"
            )
        with own_stream(options.seed, device):  # in one process vLLM seeds torch's global stream
            self._llm = LLM(
                find_model(options.model),
                dtype=DTYPES[network.dtype],
                trust_remote_code=options.execution["trust_remote_code"],
                enable_lora=True,
                max_lora_rank=_find_max_rank(network),
                generation_config="vllm",  # no defaults of the model's own
                **{"max_loras": CLIENTS_TOGETHER, **options.execution["vllm"]},
            )

    def _keep(self, network: Any, state: Mapping[str, Tensor]) -> str:
        """Return the digest of an adapter with these weights, whose files are written unless they are there."""
        from peft import get_peft_model_state_dict
        from safetensors.torch import save
        from vllm.lora.request import LoRARequest

        name, values = network.active_adapter, dict(network.named_parameters())
        values |= {key.removeprefix("network."): value for key, value in state.items()}
        weights = get_peft_model_state_dict(network, values, name, save_embedding_layers=False)
        content = save({key: weight.detach().cpu().contiguous() for key, weight in weights.items()})
        digest = hashlib.blake2b(content, key=name.encode()).hexdigest()
        if digest not in self._kept:
            self._num_adapters += 1  # vLLM keeps an adapter by its id: new weights need a new one
            folder = self._folder / f"adapter{self._num_adapters}"
            network.peft_config[name].save_pretrained(str(folder))
            (folder / WEIGHTS).write_bytes(content)
            self._kept[digest] = LoRARequest(folder.name, self._num_adapters, str(folder))
        return digest


def _check_temperature(temperature: float) -> None:
    low, high = TEMPERATURES
    if temperature != 0 and not low <= temperature <= high:
        raise ValueError(
            f"temperature={temperature} with vllm: vLLM draws at temperatures from {low} to {high}: take one of them, 0 for "
            "greedy decoding, or leave vllm out"
        )


def _check_base(network: Any) -> None:
    for layer in network.modules():
        # The base of a device computes by a twin, which is in the layer's ``forward`` (fedlight.devices.quantization).
        if isinstance(layer, nn.Linear) and hasattr(vars(layer).get("forward"), "twin"):
            raise ValueError(
                "vllm: this client's device has a quantized base, and vLLM serves the plain one: give the devices "
                "weight_bits: 16, or leave vllm out"
            )


def _sampling(job: Job) -> list[Any]:
    """Return vLLM's settings of each prompt."""
    from vllm import SamplingParams

    places = [
        (seed, place) for seed, count in zip(job.seeds, job.counts, strict=True) for place in range(count)
    ]
    return [
        SamplingParams(
            n=job.copies,
            temperature=job.temperature,
            top_p=job.top_p,
            seed=derive_seed(seed, "vllm", place),
            max_tokens=job.max_new_tokens,
            stop=list(job.stop),
            stop_token_ids=job.ends,
            skip_special_tokens=False,  # stop texts are looked for as `generation.make_stopping` does
        )
        for seed, place in places
    ]
