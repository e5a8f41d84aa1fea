"""Losses, log-probabilities and keys of texts as pure functions that return one value per example.

* Choice loss: F. Wu et al., "Towards Federated RLHF with Aggregated Client Preference for LLMs", ICLR 2025,
  https://arxiv.org/abs/2407.03038, eq. 3: cross-entropy over the logits of two choice tokens alone.
* DPO: R. Rafailov et al., "Direct Preference Optimization", NeurIPS 2023, https://arxiv.org/abs/2305.18290, eq. 7:
  ``-log sigmoid(beta * ((log pi(yw|x) - log pi_ref(yw|x)) - (log pi(yl|x) - log pi_ref(yl|x))))``.
* Bradley-Terry loss: L. Ouyang et al., "Training language models to follow instructions with human feedback", NeurIPS
  2022, https://arxiv.org/abs/2203.02155, eq. 1, for one pair; the model of choice is that of R. Bradley and M. Terry,
  "Rank Analysis of Incomplete Block Designs", Biometrika 1952, https://doi.org/10.2307/2334029.
* Contrastive loss: Z. Wang et al., "Federated Instruction Tuning of LLMs with Domain Coverage Augmentation" (FedDCA), 2024,
  https://arxiv.org/abs/2409.20135, eq. 4, whose denominator leaves the positive out. With the positive it is InfoNCE of
  A. van den Oord et al., "Representation Learning with Contrastive Predictive Coding", 2018,
  https://arxiv.org/abs/1807.03748, eq. 4.
"""

import hashlib

import torch
from torch import Tensor
from torch.nn import functional

IGNORED = -100
"""Label of a position that is not scored: prompt and padding."""


def token_log_probs(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the log-probability of each label, ``(...)``, in fp32; 0 where the label is -100.

    ``logits`` are ``(..., vocabulary)``.

    Examples:
        >>> logits = torch.tensor([[0.0, 0.0], [1.0, 0.0]])
        >>> token_log_probs(logits, torch.tensor([1, -100]))
        tensor([-0.6931, -0.0000])
    """
    scores = functional.cross_entropy(
        logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORED, reduction="none"
    )
    return -scores.view_as(labels)


def sft_loss(log_probs: Tensor, scored: Tensor) -> Tensor:
    """Return the mean negative log-probability of each example's scored tokens, ``(batch,)``, nats; 0 where none is scored.

    ``log_probs`` and the truth values ``scored`` are ``(batch, tokens)``.

    Examples:
        >>> log_probs = torch.tensor([[-1.0, -2.0, -9.0], [-4.0, -9.0, -9.0]])
        >>> sft_loss(log_probs, torch.tensor([[True, True, False], [True, False, False]])).tolist()
        [1.5, 4.0]
    """
    return -(log_probs * scored).sum(dim=1) / scored.sum(dim=1).clamp(min=1)  # else 0 / 0


def choice_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of labels, 0 for A and 1 for B, under logits ``(batch, 2)``, in nats (eq. 3 of FedBis).

    Examples:
        >>> choice_loss(torch.tensor([[0.0, 0.0], [2.0, 0.0]]), torch.tensor([0, 1]))
        tensor([0.6931, 2.1269])
    """
    return functional.cross_entropy(logits.float(), labels, reduction="none")  # eq. 3


def reward_margin(
    chosen: Tensor, rejected: Tensor, reference_chosen: Tensor, reference_rejected: Tensor
) -> Tensor:
    """Return the implicit reward of the chosen over the rejected response, without beta, ``(batch,)``, in nats.

    Arguments are log-probabilities under policy and reference, ``(batch,)``. The margin is positive where the policy prefers
    the chosen response more than the reference does.

    Examples:
        >>> nats = [torch.tensor([value]) for value in (-4.0, -7.0, -5.0, -6.0)]
        >>> reward_margin(*nats).tolist()
        [2.0]
    """
    return (chosen - reference_chosen) - (rejected - reference_rejected)  # eq. 7, without beta


def dpo_loss(margin: Tensor, beta: float) -> Tensor:
    """Return the DPO loss of each pair from its `reward_margin`; log 2 where policy and reference agree.

    A larger ``beta``, above 0, keeps the policy closer to the reference.

    Examples:
        >>> dpo_loss(torch.tensor([0.0, 20.0]), beta=0.1)
        tensor([0.6931, 0.1269])
    """
    return -functional.logsigmoid(beta * margin)  # eq. 7


def bradley_terry_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Return ``-log sigmoid(chosen - rejected)`` of rewards ``(batch,)``: log 2 where both are equal.

    Examples:
        >>> bradley_terry_loss(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 2.0]))
        tensor([0.6931, 2.1269])
    """
    return -functional.logsigmoid(chosen - rejected)  # eq. 1


def info_nce(queries: Tensor, targets: Tensor, temperature: float, include_positive: bool = False) -> Tensor:
    """Return the contrastive loss of each query, low where its own target is the nearest of the batch.

    ``-log(exp(s_ii / t) / sum_j exp(s_ij / t))`` with ``s_ij`` the cosine of query i and target j. The sum leaves ``j = i``
    out, as eq. 4 of FedDCA is printed, unless ``include_positive``. Without the positive the loss may be below 0.

    Args:
        queries: ``(batch, dimension)``, of any length above 0.
        targets: ``(batch, dimension)``; row i belongs to query i.
        temperature: t, above 0.
        include_positive: whether ``j = i`` is in the sum.

    Returns:
        ``(batch,)``, nats. Eq. 4 sums over the batch; its mean does not change with the batch's size.

    Raises:
        ValueError: the batch has one query and ``include_positive`` is off, so the sum is empty.

    Examples:
        >>> queries, targets = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([[3.0, 0.0], [0.6, 0.8]])
        >>> info_nce(queries, targets, temperature=0.5)  # cosines [[1, 0.6], [0, 0.8]]
        tensor([-0.8000, -1.6000])
        >>> info_nce(queries, targets, temperature=0.5, include_positive=True)
        tensor([0.3711, 0.1839])
    """
    if len(queries) < 2 and not include_positive:
        raise ValueError(
            f"eq. 4 compares a text with the others of its batch, and the batch has {len(queries)}: set data.batch_size to "
            "2 or more, or model.include_positive to true"
        )
    queries, targets = (functional.normalize(side.float(), dim=1) for side in (queries, targets))
    logits = queries @ targets.T / temperature  # s_ij / t of eq. 4, [batch, batch]
    positives = logits.diagonal()
    if not include_positive:
        itself = torch.eye(len(logits), dtype=torch.bool, device=logits.device)
        logits = logits.masked_fill(itself, float("-inf"))
    return logits.logsumexp(dim=1) - positives


def text_keys(input_ids: Tensor, attention_mask: Tensor) -> list[int]:
    """Return a 63-bit key per text, ``(batch, tokens)``; equal texts have equal keys, however they are padded.

    Examples:
        >>> ids = torch.tensor([[5, 6, 0], [0, 5, 6], [6, 5, 0]])
        >>> same, shifted, other = text_keys(ids, torch.tensor([[1, 1, 0], [0, 1, 1], [1, 1, 0]]))
        >>> same == shifted, same == other
        (True, False)
    """
    rows = zip(input_ids.to("cpu", torch.int64).numpy(), attention_mask.bool().cpu().numpy(), strict=True)
    return [joint_key(ids[used].tobytes()) for ids, used in rows]


def joint_key(*parts: bytes | int) -> int:
    """Return one 63-bit key for several, in order.

    Examples:
        >>> joint_key(1, 2) == joint_key(2, 1)
        False
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part if isinstance(part, bytes) else part.to_bytes(8, "little"))
    return int.from_bytes(digest.digest(), "little") >> 1  # 63 bits, for int64 tensors
