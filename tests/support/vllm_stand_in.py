"""Stand-in for vLLM 0.33.0 with the parts of its interface that fedlight uses; it computes with transformers and PEFT.

Like vLLM it reads an adapter's files once for each id, ends a completion with the token that ended it, and refuses ranks,
number types and temperatures for which vLLM has no kernels or other results.
"""

import sys
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

started: list["LLM"] = []


@dataclass
class SamplingParams:
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    max_tokens: int | None = 16
    skip_special_tokens: bool = True


@dataclass
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str = ""


@dataclass
class CompletionOutput:
    index: int
    text: str
    token_ids: list[int]


@dataclass
class RequestOutput:
    outputs: list[CompletionOutput] = field(default_factory=list)


class LLM:
    def __init__(
        self,
        model: str,
        *,
        trust_remote_code: bool = False,
        dtype: Any = "auto",
        gpu_memory_utilization: float = 0.92,
        **kwargs: Any,
    ) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        assert dtype in ("bfloat16", "float16")
        assert kwargs["max_lora_rank"] in (1, 8, 16, 32, 64, 128, 256, 320, 512)
        assert kwargs["enable_lora"]
        torch.manual_seed(0)  # as vLLM does in one process
        self.arguments = {"model": model, "dtype": dtype, "gpu_memory_utilization": gpu_memory_utilization}
        self.arguments |= kwargs
        self.base = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.network: Any = None
        self.calls: list[dict[str, Any]] = []
        started.append(self)

    def generate(
        self,
        prompts: list[dict[str, list[int]]],
        sampling_params: list[SamplingParams],
        *,
        use_tqdm: bool = True,
        lora_request: list[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        assert not use_tqdm
        assert len(prompts) == len(sampling_params) == len(lora_request)
        self.calls.append({"prompts": prompts, "sampling": sampling_params, "adapters": lora_request})
        triples = zip(prompts, sampling_params, lora_request, strict=True)
        return [self._answer(prompt["prompt_token_ids"], params, own) for prompt, params, own in triples]

    def _answer(self, ids: list[int], params: SamplingParams, adapter: LoRARequest | None) -> RequestOutput:
        assert params.temperature == 0 or 0.01 <= params.temperature <= 2
        assert params.n == 1 or params.temperature > 0
        with torch.no_grad(), self._with_adapter(adapter):
            return RequestOutput([self._complete(ids, params, index) for index in range(params.n)])

    def _with_adapter(self, adapter: LoRARequest | None) -> Any:
        from peft import PeftModel

        if adapter is None:
            return nullcontext() if self.network is None else self.network.disable_adapter()
        name = f"id{adapter.lora_int_id}"
        with torch.random.fork_rng():  # PEFT draws weights before it reads them
            if self.network is None:
                self.network = PeftModel.from_pretrained(self.base, adapter.lora_path, adapter_name=name)
            elif name not in self.network.peft_config:
                self.network.load_adapter(adapter.lora_path, adapter_name=name)
        self.network.set_adapter(name)
        return nullcontext()

    def _complete(self, ids: list[int], params: SamplingParams, index: int) -> CompletionOutput:
        stream, new = torch.Generator().manual_seed((params.seed or 0) + index), list[int]()
        text = ""
        while len(new) < params.max_tokens:
            logits = self.base(torch.tensor([ids + new])).logits[0, -1]
            new.append(self._draw(logits.float(), params, stream))
            text = self.tokenizer.decode(new, skip_special_tokens=params.skip_special_tokens)
            if new[-1] in params.stop_token_ids or any(stop in text for stop in params.stop):
                break
        return CompletionOutput(index, text, new)

    def _draw(self, logits: torch.Tensor, params: SamplingParams, stream: torch.Generator) -> int:
        if params.temperature == 0:
            return int(logits.argmax())
        shares, order = (logits / params.temperature).softmax(dim=0).sort(descending=True)
        shares[shares.cumsum(dim=0) - shares >= params.top_p] = 0
        return int(order[torch.multinomial(shares, 1, generator=stream)])


def install(monkeypatch: Any) -> list[LLM]:
    """Let ``import vllm`` find the stand-in; return the list of all that are started from now on."""
    vllm, lora, request = ModuleType("vllm"), ModuleType("vllm.lora"), ModuleType("vllm.lora.request")
    vllm.__spec__ = sys.modules[__name__].__spec__
    vllm.LLM, vllm.SamplingParams, request.LoRARequest = LLM, SamplingParams, LoRARequest
    for module in (vllm, lora, request):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    started.clear()
    return started


def adapter_folders(llm: LLM) -> list[Path]:
    """Return the folders of the adapters of a stand-in's last call, None left out."""
    return [Path(own.lora_path) for own in llm.calls[-1]["adapters"] if own is not None]
