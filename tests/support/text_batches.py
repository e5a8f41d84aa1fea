"""Batches of random token ids for language modules, from 5 to 319."""

import torch
from torch import Tensor


def make_sft_batch(batch: int = 3, tokens: int = 9, seed: int = 0) -> dict[str, Tensor]:
    """Row r has 3 prompt tokens and r tokens of padding."""
    stream = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, 320, (batch, tokens), generator=stream)
    mask = (torch.arange(tokens)[None] < tokens - torch.arange(batch)[:, None]).long()
    labels = torch.where(mask.bool() & (torch.arange(tokens) >= 3), ids, -100)
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}


def make_pair_batch(batch: int = 3, seed: int = 0) -> dict:
    """Chosen and rejected share the prompt; the rejected ones are two tokens shorter."""
    chosen, rejected = make_sft_batch(batch, 9, seed), make_sft_batch(batch, 7, seed + 100)
    rejected["input_ids"][:, :3] = chosen["input_ids"][:, :3]
    return {"chosen": chosen, "rejected": rejected, "index": torch.arange(batch)}


def make_choice_batch(batch: int = 3, tokens: int = 9, seed: int = 0) -> dict[str, Tensor]:
    texts = make_sft_batch(batch, tokens, seed)
    return {**texts, "labels": torch.arange(batch) % 2}
