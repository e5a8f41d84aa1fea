"""Tiny configs of causal language models that differ in attention, positions, layers, experts and heads."""

import transformers

SIZES = {
    **{"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1},
}
GATED = {**SIZES, "intermediate_size": 64, "num_key_value_heads": 2}
MIXER = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_d_ssm": 64}
DELTA = {
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8},
    **{"linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"]},
}
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
GPT2 = {"vocab_size": 320, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
ENDS = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**GATED),
    "gpt2": lambda: transformers.GPT2Config(**GPT2, **ENDS),
    "gemma2": lambda: transformers.Gemma2Config(
        **GATED, head_dim=8, sliding_window=6, query_pre_attn_scalar=8
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(**GATED, head_dim=8, sliding_window=160),
    "qwen3": lambda: transformers.Qwen3Config(**GATED, head_dim=8),
    "opt": lambda: transformers.OPTConfig(**SIZES, ffn_dim=64, word_embed_proj_dim=32),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**SIZES, intermediate_size=64),
    "mpt": lambda: transformers.MptConfig(vocab_size=320, d_model=32, n_layers=2, n_heads=4, max_seq_len=256),
    "bloom": lambda: transformers.BloomConfig(vocab_size=320, hidden_size=32, n_layer=2, n_head=4),
    "mamba": lambda: transformers.MambaConfig(vocab_size=320, hidden_size=32, num_hidden_layers=2, **ENDS),
    "falcon_h1": lambda: transformers.FalconH1Config(**GATED, **MIXER, lm_head_multiplier=2.0),
    "qwen3_next": lambda: transformers.Qwen3NextConfig(
        **GATED, **DELTA, **EXPERTS, head_dim=8, shared_expert_intermediate_size=16
    ),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(**GATED, **EXPERTS, shared_expert_intermediate_size=16),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **{**GATED, **LATENT, "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 4},
        **{"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    ),
    "deepseek_v4": lambda: transformers.DeepseekV4Config(
        **{**GATED, "head_dim": 8, "q_lora_rank": 16, "o_lora_rank": 8, "o_groups": 2, "index_n_heads": 2},
        **{"index_head_dim": 8, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2},
        layer_types=["heavily_compressed_attention"] * 2,
    ),
    "llama4": lambda: transformers.Llama4TextConfig(
        **{
            **GATED,
            "head_dim": 8,
            "num_local_experts": 2,
            "attention_chunk_size": 8,
            "intermediate_size_mlp": 64,
        }
    ),
}
REFUSED = {
    "xlnet": (
        lambda: transformers.XLNetConfig(vocab_size=320, d_model=32, n_layer=2, n_head=4, d_inner=64),
        "xlnet reads tokens before it has to predict them",
    ),
    "rwkv": (
        lambda: transformers.RwkvConfig(
            vocab_size=320, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32
        ),
        "rwkv reads padding as text",
    ),
    "recurrent_gemma": (
        lambda: transformers.RecurrentGemmaConfig(
            **{**GATED, "num_hidden_layers": 3, "num_key_value_heads": 1}, lru_width=32
        ),
        "recurrent_gemma computes its logits in an unknown way",
    ),
    "bert": (
        lambda: transformers.BertConfig(**{**SIZES, "bos_token_id": 2}, intermediate_size=64),
        "bert computes its logits in an unknown way",
    ),
    "rembert": (
        lambda: transformers.RemBertConfig(
            **{**SIZES, "bos_token_id": 2},
            **{"intermediate_size": 64, "input_embedding_size": 16, "output_embedding_size": 24},
        ),
        r"rembert does not compute \(mat1 and mat2",
    ),
    "bart": (
        lambda: transformers.BartConfig(
            **{"vocab_size": 320, "d_model": 32, "decoder_layers": 1, "decoder_attention_heads": 4},
            **{"decoder_ffn_dim": 64, "is_decoder": True, "is_encoder_decoder": False},
        ),
        "bart is an encoder with a decoder",
    ),
    "t5": (
        lambda: transformers.T5Config(vocab_size=320, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4),
        "t5 is an encoder with a decoder",
    ),
}
