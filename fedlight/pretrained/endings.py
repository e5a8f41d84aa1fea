"""Tokens that end an answer: those of the model, of the tokenizer, and of the chat template between two turns."""

from typing import Any

CONVERSATION = (("user", "first question"), ("assistant", "first answer"), ("user", "second question"))


def end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Return the tokens after which an answer is over, in ascending order.

    They are the end tokens of the model's generation config and of the tokenizer, and the added tokens that the chat
    template puts between an answer and the next question: the end of the turn, and the opening of the next one.
    """
    configured = model.generation_config.eos_token_id
    named = {tokenizer.eos_token_id, *(configured if isinstance(configured, list) else [configured])} - {None}
    return sorted(named | turn_tokens(tokenizer))


def turn_tokens(tokenizer: Any) -> set[int]:
    """Return the added tokens between an answer and the next question; none without a chat template."""
    if not getattr(tokenizer, "chat_template", None):
        return set()
    messages = [{"role": role, "content": content} for role, content in CONVERSATION]
    text: str = tokenizer.apply_chat_template(messages, tokenize=False)
    _, _, rest = text.partition(CONVERSATION[1][1])  # after the first answer
    between, mark, _ = rest.partition(CONVERSATION[2][1])
    if not mark:  # a template that leaves earlier turns out
        return set()
    added = tokenizer.added_tokens_decoder
    ids = tokenizer(between, add_special_tokens=False)["input_ids"]
    # Gemma adds line breaks, which stand between turns and within answers.
    return {token for token in ids if token in added and added[token].content.strip()}
