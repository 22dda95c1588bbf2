"""Tiny encoders and decoders of transformers for `graphopt bench breadth`."""

from __future__ import annotations

from graphopt.bench.breadth_inputs import (
    FEW_HEADS,
    LENGTH,
    VOCABULARY,
    Architecture,
    answer,
    choose,
    classify,
    classify_unmasked,
    continue_cached,
    continue_padded,
    continue_text,
    continue_unmasked,
    label_tokens,
    masked,
    text,
    with_boxes,
)

GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_experts": 4, "moe_intermediate_size": 32}

ENCODERS: dict[str, Architecture] = {
    "bert": text("BertConfig", "BertForSequenceClassification", classify),
    "bert-masked": text("BertConfig", "BertForMaskedLM", masked),
    "bert-tokens": text("BertConfig", "BertForTokenClassification", label_tokens),
    "bert-answers": text("BertConfig", "BertForQuestionAnswering", answer),
    "bert-choices": text("BertConfig", "BertForMultipleChoice", choose),
    "roberta": text("RobertaConfig", "RobertaForSequenceClassification", classify),
    "xlm-roberta": text("XLMRobertaConfig", "XLMRobertaForMaskedLM", masked),
    "camembert": text("CamembertConfig", "CamembertForTokenClassification", label_tokens),
    "deberta": text(
        "DebertaConfig", "DebertaForSequenceClassification", classify, relative_attention=True, pos_att_type=["c2p", "p2c"],
    ),
    "deberta-v2": text(
        "DebertaV2Config", "DebertaV2ForSequenceClassification", classify, relative_attention=True, pos_att_type=["c2p", "p2c"],
        position_buckets=8, norm_rel_ebd="layer_norm", share_att_key=True,
    ),
    "albert": text("AlbertConfig", "AlbertForSequenceClassification", classify, embedding_size=16),
    "electra": text("ElectraConfig", "ElectraForSequenceClassification", classify, embedding_size=16),
    "electra-pretraining": text("ElectraConfig", "ElectraForPreTraining", label_tokens, embedding_size=16),
    "distilbert": Architecture(
        "DistilBertConfig", "DistilBertForSequenceClassification", classify,
        {"vocab_size": VOCABULARY, "dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 64},
    ),
    "mobilebert": text(
        "MobileBertConfig", "MobileBertForSequenceClassification", classify, embedding_size=16, intra_bottleneck_size=16,
        true_hidden_size=16,
    ),
    "squeezebert": text("SqueezeBertConfig", "SqueezeBertForSequenceClassification", classify, embedding_size=32),
    "convbert": text("ConvBertConfig", "ConvBertForSequenceClassification", classify, embedding_size=16, head_ratio=2),
    "mpnet": text("MPNetConfig", "MPNetForSequenceClassification", classify),
    "modernbert": text(
        "ModernBertConfig", "ModernBertForSequenceClassification", classify, local_attention=8, cls_token_id=3, sep_token_id=4,
    ),
    "xlnet": Architecture(
        "XLNetConfig", "XLNetForSequenceClassification", classify,
        {"vocab_size": VOCABULARY, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64},
    ),
    "longformer": text("LongformerConfig", "LongformerForSequenceClassification", classify, attention_window=8),
    "big-bird": text(
        "BigBirdConfig", "BigBirdForSequenceClassification", classify, attention_type="block_sparse", block_size=2,
        num_random_blocks=1
    ),
    "big-bird-full": text("BigBirdConfig", "BigBirdForMaskedLM", masked, attention_type="original_full"),
    "fnet": text("FNetConfig", "FNetForSequenceClassification", classify_unmasked),
    "funnel": Architecture(
        "FunnelConfig", "FunnelForSequenceClassification", classify,
        {"vocab_size": VOCABULARY, "d_model": 32, "block_sizes": [1, 1], "num_decoder_layers": 1, "n_head": 4, "d_head": 8,
        "d_inner": 64},
    ),
    "nystromformer": text(
        "NystromformerConfig", "NystromformerForSequenceClassification", classify, num_landmarks=4, segment_means_seq_len=4
    ),
    "roformer": text("RoFormerConfig", "RoFormerForSequenceClassification", classify, embedding_size=32),
    "canine": text(
        "CanineConfig", "CanineForSequenceClassification", classify, downsampling_rate=2, num_hash_buckets=64,
        num_hash_functions=4,
        local_transformer_stride=8,
    ),
    "esm": text("EsmConfig", "EsmForMaskedLM", masked, position_embedding_type="rotary", mask_token_id=4),
    "reformer": Architecture(
        "ReformerConfig", "ReformerForMaskedLM", masked,
        {
            "vocab_size": VOCABULARY, "hidden_size": 32, "num_attention_heads": 4, "attention_head_size": 8,
            "feed_forward_size": 64,
            "axial_pos_embds_dim": (16, 16), "axial_pos_shape": (4, 4), "attn_layers": ["local", "lsh"], "num_buckets": 2,
            "local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4, "is_decoder": False, "hash_seed": 0,
            "max_position_embeddings": 16,
        },
    ),
    "layoutlm": text("LayoutLMConfig", "LayoutLMForTokenClassification", with_boxes, max_2d_position_embeddings=64),
    "layoutlmv3": text(
        "LayoutLMv3Config", "LayoutLMv3ForTokenClassification", with_boxes, max_2d_position_embeddings=64, coordinate_size=5,
        shape_size=6, visual_embed=False, rel_pos_bins=8, rel_2d_pos_bins=8,
    ),
    "perceiver": Architecture(
        "PerceiverConfig", "PerceiverForMaskedLM", masked,
        {
            "vocab_size": VOCABULARY, "d_model": 32, "d_latents": 32, "num_latents": 8, "num_blocks": 1,
            "num_self_attends_per_block": 2,
            "num_self_attention_heads": 4, "num_cross_attention_heads": 4, "max_position_embeddings": LENGTH, "qk_channels": 32,
            "v_channels": 32,
        },
    ),
    "tapas": text("TapasConfig", "TapasForMaskedLM", masked, type_vocab_sizes=[3, 8, 8, 2, 8, 8, 3]),
    "luke": text("LukeConfig", "LukeForSequenceClassification", classify, entity_vocab_size=10, entity_emb_size=16),
    "yoso": text("YosoConfig", "YosoForSequenceClassification", classify, use_expectation=True),
    "xmod": text("XmodConfig", "XmodForSequenceClassification", classify, languages=["en_XX"], default_language="en_XX"),
}  # fmt: skip

DECODERS: dict[str, Architecture] = {
    "gpt2": Architecture("GPT2Config", "GPT2LMHeadModel", continue_text, GPT2),
    "gpt2-cached": Architecture("GPT2Config", "GPT2LMHeadModel", continue_cached, GPT2),
    "gpt2-classify": Architecture("GPT2Config", "GPT2ForSequenceClassification", classify, {**GPT2, "pad_token_id": 0}),
    "gpt-neo": Architecture(
        "GPTNeoConfig", "GPTNeoForCausalLM", continue_text,
        {
            "vocab_size": VOCABULARY, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "intermediate_size": 64,
            "window_size": 8,
            "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
        },
    ),
    "gpt-neox": text("GPTNeoXConfig", "GPTNeoXForCausalLM", continue_padded),
    "gptj": Architecture("GPTJConfig", "GPTJForCausalLM", continue_text, {**GPT2, "rotary_dim": 4}),
    "gpt-bigcode": Architecture("GPTBigCodeConfig", "GPTBigCodeForCausalLM", continue_text, GPT2),
    "codegen": Architecture("CodeGenConfig", "CodeGenForCausalLM", continue_text, {**GPT2, "rotary_dim": 4}),
    "openai-gpt": Architecture("OpenAIGPTConfig", "OpenAIGPTLMHeadModel", continue_text, GPT2),
    "ctrl": Architecture("CTRLConfig", "CTRLLMHeadModel", continue_text, {**GPT2, "dff": 64}),
    "opt": text("OPTConfig", "OPTForCausalLM", continue_padded, ffn_dim=64, word_embed_proj_dim=16),
    "bloom": Architecture(
        "BloomConfig", "BloomForCausalLM", continue_padded, {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2,
        "n_head": 4}
    ),
    "llama": text("LlamaConfig", "LlamaForCausalLM", continue_text, **FEW_HEADS),
    "llama-cached": text("LlamaConfig", "LlamaForCausalLM", continue_cached, **FEW_HEADS),
    "llama-padded": text("LlamaConfig", "LlamaForSequenceClassification", classify, **FEW_HEADS),
    "llama-eager-attention": text("LlamaConfig", "LlamaForCausalLM", continue_padded, attn_implementation="eager", **FEW_HEADS),
    "llama-tied": text("LlamaConfig", "LlamaForCausalLM", continue_text, tie_word_embeddings=True, **FEW_HEADS),
    "mistral": text("MistralConfig", "MistralForCausalLM", continue_padded, sliding_window=8, **FEW_HEADS),
    "mixtral": text("MixtralConfig", "MixtralForCausalLM", continue_text, output_router_logits=True, **FEW_HEADS, **EXPERTS),
    "qwen2": text("Qwen2Config", "Qwen2ForCausalLM", continue_padded, **FEW_HEADS),
    "qwen3": text("Qwen3Config", "Qwen3ForCausalLM", continue_text, head_dim=8, **FEW_HEADS),
    "qwen2-moe": text(
        "Qwen2MoeConfig", "Qwen2MoeForCausalLM", continue_text, shared_expert_intermediate_size=32, **FEW_HEADS, **EXPERTS
    ),
    "qwen3-moe": text("Qwen3MoeConfig", "Qwen3MoeForCausalLM", continue_text, head_dim=8, **FEW_HEADS, **EXPERTS),
    "gemma": text("GemmaConfig", "GemmaForCausalLM", continue_text, head_dim=8, **FEW_HEADS),
    "gemma2": text("Gemma2Config", "Gemma2ForCausalLM", continue_text, head_dim=8, sliding_window=8, **FEW_HEADS),
    "gemma3": text("Gemma3TextConfig", "Gemma3ForCausalLM", continue_text, head_dim=8, sliding_window=8, **FEW_HEADS),
    "phi": text("PhiConfig", "PhiForCausalLM", continue_text, partial_rotary_factor=0.5),
    "phi3": text("Phi3Config", "Phi3ForCausalLM", continue_text, **FEW_HEADS),
    "falcon": text("FalconConfig", "FalconForCausalLM", continue_padded, multi_query=True),
    "falcon-alibi": text("FalconConfig", "FalconForCausalLM", continue_padded, alibi=True),
    "mpt": Architecture(
        "MptConfig", "MptForCausalLM", continue_text,
        {"vocab_size": VOCABULARY, "d_model": 32, "n_layers": 2, "n_heads": 4, "expansion_ratio": 2, "max_seq_len": 64},
    ),
    "stablelm": text("StableLmConfig", "StableLmForCausalLM", continue_text, **FEW_HEADS),
    "starcoder2": text("Starcoder2Config", "Starcoder2ForCausalLM", continue_text, **FEW_HEADS),
    "olmo2": text("Olmo2Config", "Olmo2ForCausalLM", continue_text),
    "cohere": text("CohereConfig", "CohereForCausalLM", continue_text, **FEW_HEADS),
    "granite-moe": text("GraniteMoeConfig", "GraniteMoeForCausalLM", continue_text, **FEW_HEADS, **EXPERTS),
    "gpt-oss": text("GptOssConfig", "GptOssForCausalLM", continue_text, head_dim=8, sliding_window=8, **FEW_HEADS, **EXPERTS),
    "deepseek-v3": text(
        "DeepseekV3Config", "DeepseekV3ForCausalLM", continue_text, n_routed_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=32,
        n_group=1, topk_group=1, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8,
        first_k_dense_replace=1, num_key_value_heads=4,
    ),
    "persimmon": text("PersimmonConfig", "PersimmonForCausalLM", continue_text),
    "xglm": Architecture(
        "XGLMConfig", "XGLMForCausalLM", continue_text,
        {"vocab_size": VOCABULARY, "d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 64,
        "max_position_embeddings": 64},
    ),
    "xlnet-causal": Architecture(
        "XLNetConfig", "XLNetLMHeadModel", continue_text,
        {"vocab_size": VOCABULARY, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64},
    ),
    "rwkv": Architecture(
        "RwkvConfig", "RwkvForCausalLM", continue_unmasked,
        {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "attention_hidden_size": 32, "context_length": 64},
    ),
    "mamba": text("MambaConfig", "MambaForCausalLM", continue_unmasked, state_size=8, time_step_rank=4),
    "mamba2": text(
        "Mamba2Config", "Mamba2ForCausalLM", continue_unmasked, state_size=8, num_heads=8, head_dim=8, n_groups=2, chunk_size=8
    ),
    "recurrent-gemma": text(
        "RecurrentGemmaConfig", "RecurrentGemmaForCausalLM", continue_text, lru_width=32, attention_window_size=8,
        block_types=["recurrent", "attention"], num_key_value_heads=1,
    ),
}  # fmt: skip
