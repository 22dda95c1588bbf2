"""Tiny models of transformers for `graphopt bench breadth`."""

from __future__ import annotations

import torch

from graphopt.bench.breadth_inputs import (
    BATCH,
    FEW_HEADS,
    LENGTH,
    SEQUENCE,
    SIZES,
    T5,
    VISION,
    VOCABULARY,
    Architecture,
    answer,
    boxes,
    choose,
    classify,
    classify_unmasked,
    continue_cached,
    continue_padded,
    continue_text,
    continue_unmasked,
    label_tokens,
    mask_patches,
    masked,
    pairs,
    picture_and_text,
    picture_tokens,
    pyramid,
    recognise,
    segments,
    sequences,
    sounds,
    spectra,
    spectra_labels,
    speech,
    text,
    transcribe,
    transcribe_padded,
    translate,
    vision,
    with_boxes,
)
from graphopt.bench.breadth_run import Case

ROTARY = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}

GPT2 = {
    "vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_experts": 4, "moe_intermediate_size": 32}

ENCODERS: dict[str, Architecture] = {
    "bert": text("Bert", "ForSequenceClassification", classify),
    "bert-masked": text("Bert", "ForMaskedLM", masked),
    "bert-tokens": text("Bert", "ForTokenClassification", label_tokens),
    "bert-answers": text("Bert", "ForQuestionAnswering", answer),
    "bert-choices": text("Bert", "ForMultipleChoice", choose),
    "roberta": text("Roberta", "ForSequenceClassification", classify),
    "xlm-roberta": text("XLMRoberta", "ForMaskedLM", masked),
    "camembert": text("Camembert", "ForTokenClassification", label_tokens),
    "deberta": text("Deberta", "ForSequenceClassification", classify, relative_attention=True, pos_att_type=["c2p", "p2c"]),
    "deberta-v2": text(
        "DebertaV2", "ForSequenceClassification", classify, relative_attention=True, pos_att_type=["c2p", "p2c"],
        position_buckets=8, norm_rel_ebd="layer_norm", share_att_key=True,
    ),
    "albert": text("Albert", "ForSequenceClassification", classify, embedding_size=16),
    "electra": text("Electra", "ForSequenceClassification", classify, embedding_size=16),
    "electra-pretraining": text("Electra", "ForPreTraining", label_tokens, embedding_size=16),
    "distilbert": Architecture(
        "DistilBert", "ForSequenceClassification", classify,
        {"vocab_size": VOCABULARY, "dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 64},
    ),
    "mobilebert": text(
        "MobileBert", "ForSequenceClassification", classify, embedding_size=16, intra_bottleneck_size=16, true_hidden_size=16,
    ),
    "squeezebert": text("SqueezeBert", "ForSequenceClassification", classify, embedding_size=32),
    "convbert": text("ConvBert", "ForSequenceClassification", classify, embedding_size=16, head_ratio=2),
    "mpnet": text("MPNet", "ForSequenceClassification", classify),
    "modernbert": text("ModernBert", "ForSequenceClassification", classify, local_attention=8, cls_token_id=3, sep_token_id=4),
    "xlnet": Architecture(
        "XLNet", "ForSequenceClassification", classify,
        {"vocab_size": VOCABULARY, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64},
    ),
    "longformer": text("Longformer", "ForSequenceClassification", classify, attention_window=8),
    "big-bird": text(
        "BigBird", "ForSequenceClassification", classify, attention_type="block_sparse", block_size=2, num_random_blocks=1,
    ),
    "big-bird-full": text("BigBird", "ForMaskedLM", masked, attention_type="original_full"),
    "fnet": text("FNet", "ForSequenceClassification", classify_unmasked),
    "funnel": Architecture(
        "Funnel", "ForSequenceClassification", classify, {"vocab_size": VOCABULARY, "d_model": 32, "block_sizes": [1, 1],
        "num_decoder_layers": 1, "n_head": 4, "d_head": 8, "d_inner": 64},
    ),
    "nystromformer": text("Nystromformer", "ForSequenceClassification", classify, num_landmarks=4, segment_means_seq_len=4),
    "roformer": text("RoFormer", "ForSequenceClassification", classify, embedding_size=32),
    "canine": text(
        "Canine", "ForSequenceClassification", classify, downsampling_rate=2, num_hash_buckets=64, num_hash_functions=4,
        local_transformer_stride=8,
    ),
    "esm": text("Esm", "ForMaskedLM", masked, position_embedding_type="rotary", mask_token_id=4),
    "reformer": Architecture(
        "Reformer", "ForMaskedLM", masked, {"vocab_size": VOCABULARY, "hidden_size": 32, "num_attention_heads": 4,
        "attention_head_size": 8, "feed_forward_size": 64, "axial_pos_embds_dim": (16, 16), "axial_pos_shape": (4, 4),
        "attn_layers": ["local", "lsh"], "num_buckets": 2, "local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4, "is_decoder":
        False, "hash_seed": 0, "max_position_embeddings": 16},
    ),
    "layoutlm": text("LayoutLM", "ForTokenClassification", with_boxes, max_2d_position_embeddings=64),
    "layoutlmv3": text(
        "LayoutLMv3", "ForTokenClassification", with_boxes, max_2d_position_embeddings=64, coordinate_size=5,
        shape_size=6, visual_embed=False, rel_pos_bins=8, rel_2d_pos_bins=8,
    ),
    "perceiver": Architecture(
        "Perceiver", "ForMaskedLM", masked, {"vocab_size": VOCABULARY, "d_model": 32, "d_latents": 32, "num_latents": 8,
        "num_blocks": 1, "num_self_attends_per_block": 2, "num_self_attention_heads": 4, "num_cross_attention_heads": 4,
        "max_position_embeddings": LENGTH, "qk_channels": 32, "v_channels": 32},
    ),
    "tapas": text("Tapas", "ForMaskedLM", masked, type_vocab_sizes=[3, 8, 8, 2, 8, 8, 3]),
    "luke": text("Luke", "ForSequenceClassification", classify, entity_vocab_size=10, entity_emb_size=16),
    "yoso": text("Yoso", "ForSequenceClassification", classify, use_expectation=True),
    "xmod": text("Xmod", "ForSequenceClassification", classify, languages=["en_XX"], default_language="en_XX"),
}  # fmt: skip

DECODERS: dict[str, Architecture] = {
    "gpt2": Architecture("GPT2", "LMHeadModel", continue_text, GPT2),
    "gpt2-cached": Architecture("GPT2", "LMHeadModel", continue_cached, GPT2),
    "gpt2-classify": Architecture("GPT2", "ForSequenceClassification", classify, {**GPT2, "pad_token_id": 0}),
    "gpt-neo": Architecture(
        "GPTNeo", "ForCausalLM", continue_text, {"vocab_size": VOCABULARY, "hidden_size": 32, "num_layers": 2, "num_heads": 4,
        "intermediate_size": 64, "window_size": 8, "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 64,
        "bos_token_id": 1, "eos_token_id": 2},
    ),
    "gpt-neox": text("GPTNeoX", "ForCausalLM", continue_padded),
    "gptj": Architecture("GPTJ", "ForCausalLM", continue_text, {**GPT2, "rotary_dim": 4}),
    "gpt-bigcode": Architecture("GPTBigCode", "ForCausalLM", continue_text, GPT2),
    "codegen": Architecture("CodeGen", "ForCausalLM", continue_text, {**GPT2, "rotary_dim": 4}),
    "openai-gpt": Architecture("OpenAIGPT", "LMHeadModel", continue_text, GPT2),
    "ctrl": Architecture("CTRL", "LMHeadModel", continue_text, {**GPT2, "dff": 64}),
    "opt": text("OPT", "ForCausalLM", continue_padded, ffn_dim=64, word_embed_proj_dim=16),
    "bloom": Architecture(
        "Bloom", "ForCausalLM", continue_padded, {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    ),
    "llama": text("Llama", "ForCausalLM", continue_text, **FEW_HEADS),
    "llama-cached": text("Llama", "ForCausalLM", continue_cached, **FEW_HEADS),
    "llama-padded": text("Llama", "ForSequenceClassification", classify, **FEW_HEADS),
    "llama-eager-attention": text("Llama", "ForCausalLM", continue_padded, attn_implementation="eager", **FEW_HEADS),
    "llama-tied": text("Llama", "ForCausalLM", continue_text, tie_word_embeddings=True, **FEW_HEADS),
    "mistral": text("Mistral", "ForCausalLM", continue_padded, sliding_window=8, **FEW_HEADS),
    "mixtral": text("Mixtral", "ForCausalLM", continue_text, output_router_logits=True, **FEW_HEADS, **EXPERTS),
    "qwen2": text("Qwen2", "ForCausalLM", continue_padded, **FEW_HEADS),
    "qwen3": text("Qwen3", "ForCausalLM", continue_text, head_dim=8, **FEW_HEADS),
    "qwen2-moe": text("Qwen2Moe", "ForCausalLM", continue_text, shared_expert_intermediate_size=32, **FEW_HEADS, **EXPERTS),
    "qwen3-moe": text("Qwen3Moe", "ForCausalLM", continue_text, head_dim=8, **FEW_HEADS, **EXPERTS),
    "gemma": text("Gemma", "ForCausalLM", continue_text, head_dim=8, **FEW_HEADS),
    "gemma2": text("Gemma2", "ForCausalLM", continue_text, head_dim=8, sliding_window=8, **FEW_HEADS),
    "gemma3": Architecture(
        "Gemma3", "ForCausalLM", continue_text, {**SIZES, "head_dim": 8, "sliding_window": 8, **FEW_HEADS}, config="Gemma3Text",
    ),
    "phi": text("Phi", "ForCausalLM", continue_text, partial_rotary_factor=0.5),
    "phi3": text("Phi3", "ForCausalLM", continue_text, **FEW_HEADS),
    "falcon": text("Falcon", "ForCausalLM", continue_padded, multi_query=True),
    "falcon-alibi": text("Falcon", "ForCausalLM", continue_padded, alibi=True),
    "mpt": Architecture(
        "Mpt", "ForCausalLM", continue_text,
        {"vocab_size": VOCABULARY, "d_model": 32, "n_layers": 2, "n_heads": 4, "expansion_ratio": 2, "max_seq_len": 64},
    ),
    "stablelm": text("StableLm", "ForCausalLM", continue_text, **FEW_HEADS),
    "starcoder2": text("Starcoder2", "ForCausalLM", continue_text, **FEW_HEADS),
    "olmo2": text("Olmo2", "ForCausalLM", continue_text),
    "cohere": text("Cohere", "ForCausalLM", continue_text, **FEW_HEADS),
    "granite-moe": text("GraniteMoe", "ForCausalLM", continue_text, **FEW_HEADS, **EXPERTS),
    "gpt-oss": text("GptOss", "ForCausalLM", continue_text, head_dim=8, sliding_window=8, **FEW_HEADS, **EXPERTS),
    "deepseek-v3": text(
        "DeepseekV3", "ForCausalLM", continue_text, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        n_group=1, topk_group=1, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8,
        first_k_dense_replace=1, num_key_value_heads=4,
    ),
    "persimmon": text("Persimmon", "ForCausalLM", continue_text),
    "xglm": Architecture(
        "XGLM", "ForCausalLM", continue_text, {"vocab_size": VOCABULARY, "d_model": 32, "num_layers": 2, "attention_heads": 4,
        "ffn_dim": 64, "max_position_embeddings": 64},
    ),
    "xlnet-causal": Architecture(
        "XLNet", "LMHeadModel", continue_text,
        {"vocab_size": VOCABULARY, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64},
    ),
    "rwkv": Architecture(
        "Rwkv", "ForCausalLM", continue_unmasked,
        {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "attention_hidden_size": 32, "context_length": 64},
    ),
    "mamba": text("Mamba", "ForCausalLM", continue_unmasked, state_size=8, time_step_rank=4),
    "mamba2": text("Mamba2", "ForCausalLM", continue_unmasked, state_size=8, num_heads=8, head_dim=8, n_groups=2, chunk_size=8),
    "recurrent-gemma": text(
        "RecurrentGemma", "ForCausalLM", continue_text, lru_width=32, attention_window_size=8,
        block_types=["recurrent", "attention"], num_key_value_heads=1,
    ),
}  # fmt: skip

SEQUENCES: dict[str, Architecture] = {
    "t5": Architecture("T5", "ForConditionalGeneration", translate, T5),
    "mt5": Architecture("MT5", "ForConditionalGeneration", translate, {**T5, "feed_forward_proj": "gated-gelu"}),
    "umt5": Architecture("UMT5", "ForConditionalGeneration", translate, T5),
    "longt5": Architecture("LongT5", "ForConditionalGeneration", translate, {**T5, "local_radius": 3}),
    "switch-transformers": Architecture(
        "SwitchTransformers", "ForConditionalGeneration", translate, {**T5, "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1, "num_experts": 4, "expert_capacity": 8, "router_jitter_noise": 0.0},
    ),
    "bart": sequences("Bart", "ForConditionalGeneration"),
    "bart-cached": sequences("Bart", "ForConditionalGeneration", lambda c: {**translate(c), "use_cache": True}),
    "mbart": sequences("MBart", "ForConditionalGeneration"),
    "pegasus": sequences("Pegasus", "ForConditionalGeneration"),
    "marian": sequences("Marian", "MTModel"),
    "m2m100": sequences("M2M100", "ForConditionalGeneration"),
    "blenderbot": sequences("Blenderbot", "ForConditionalGeneration"),
    "plbart": sequences("PLBart", "ForConditionalGeneration"),
    "led": sequences(
        "LED", "ForConditionalGeneration", attention_window=8, max_encoder_position_embeddings=64,
        max_decoder_position_embeddings=64,
    ),
    "bigbird-pegasus": sequences("BigBirdPegasus", "ForConditionalGeneration", attention_type="original_full"),
    "prophetnet": Architecture(
        "ProphetNet", "ForConditionalGeneration", translate, {"vocab_size": VOCABULARY, "hidden_size": 32, "num_encoder_layers":
        2, "num_decoder_layers": 2, "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4, "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64, "ngram": 2, "num_buckets": 8, "relative_max_distance": 16, "max_position_embeddings": 64,
        "decoder_start_token_id": 1},
    ),
    "whisper": Architecture(
        "Whisper", "ForConditionalGeneration", spectra,
        {**SEQUENCE, "num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 32},
    ),
    "whisper-classify": Architecture(
        "Whisper", "ForAudioClassification", spectra_labels,
        {**SEQUENCE, "num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 32, "use_weighted_layer_sum": True},
    ),
}  # fmt: skip

SIGHT: dict[str, Architecture] = {
    "vit": vision("ViT", "ForImageClassification"),
    "deit": vision("DeiT", "ForImageClassification"),
    "beit": vision("Beit", "ForImageClassification", use_relative_position_bias=True),
    "beit-masked": vision(
        "Beit", "ForMaskedImageModeling", lambda c: {**mask_patches(c), "labels": torch.randint(0, 50, (12,))},
        vocab_size=50, use_mask_token=True,
    ),
    "vit-mae": vision(
        "ViTMAE", "ForPreTraining", lambda c: {"pixel_values": torch.randn(BATCH, 3, 32, 32)},
        decoder_hidden_size=32, decoder_num_hidden_layers=1, decoder_num_attention_heads=4, decoder_intermediate_size=64,
    ),
    "dinov2": vision("Dinov2", "ForImageClassification"),
    "swin": pyramid("Swin", "ForImageClassification", embed_dim=16, depths=[2, 1], num_heads=[2, 4], window_size=2, patch_size=4),
    "swinv2": pyramid(
        "Swinv2", "ForImageClassification", embed_dim=16, depths=[2, 1], num_heads=[2, 4], window_size=2, patch_size=4,
    ),
    "convnext": pyramid("ConvNext", "ForImageClassification", hidden_sizes=[16, 32], depths=[1, 1], num_stages=2, patch_size=4),
    "convnextv2": pyramid(
        "ConvNextV2", "ForImageClassification", hidden_sizes=[16, 32], depths=[1, 1], num_stages=2, patch_size=4,
    ),
    "resnet": pyramid("ResNet", "ForImageClassification", embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1]),
    "regnet": pyramid(
        "RegNet", "ForImageClassification", embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], groups_width=8,
    ),
    "mobilenet-v2": pyramid("MobileNetV2", "ForImageClassification", depth_multiplier=0.25, min_depth=4),
    "mobilevit": pyramid(
        "MobileViT", "ForImageClassification", image_size=64, patch_size=2, hidden_sizes=[16, 24, 32],
        neck_hidden_sizes=[8, 8, 16, 16, 24, 32, 32],
    ),
    "efficientnet": pyramid(
        "EfficientNet", "ForImageClassification", width_coefficient=0.25, depth_coefficient=0.25, hidden_dim=320,
    ),
    "segformer": pyramid(
        "Segformer", "ForSemanticSegmentation", segments, hidden_sizes=[8, 16], depths=[1, 1], num_attention_heads=[1, 2],
        sr_ratios=[2, 1], patch_sizes=[3, 3], strides=[2, 2], num_encoder_blocks=2, decoder_hidden_size=16, mlp_ratios=[2, 2],
    ),
    "poolformer": pyramid(
        "PoolFormer", "ForImageClassification", hidden_sizes=[8, 16], depths=[1, 1], patch_sizes=[3, 3],
        strides=[2, 2], padding=[1, 1], num_encoder_blocks=2, mlp_ratio=2.0,
    ),
    "pvt": pyramid("Pvt", "ForImageClassification", image_size=64),
    "levit": pyramid(
        "Levit", "ForImageClassification", image_size=64, hidden_sizes=[16, 24, 32], num_attention_heads=[2, 3, 4],
        depths=[1, 1, 1], key_dim=[8, 8, 8],
    ),
    "yolos": vision("Yolos", "ForObjectDetection", boxes, image_size=[64, 64], num_detection_tokens=6),
    "detr": Architecture(
        "Detr", "ForObjectDetection", boxes,
        {
            "d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_queries": 6, "num_labels": 5, "use_timm_backbone": False,
            "use_pretrained_backbone": False, "backbone": None, "auxiliary_loss": True,
        },
        {"backbone_config": ("ResNetConfig", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1],
        "out_features": ["stage2"]})},
    ),
    "clip": Architecture(
        "CLIP", "Model", pairs, {"projection_dim": 16},
        {
            "text_config": ("CLIPTextConfig", {**SIZES, "eos_token_id": VOCABULARY - 1}),
            "vision_config": ("CLIPVisionConfig", VISION),
        },
    ),
    "siglip": Architecture(
        "Siglip", "Model", pairs, {},
        {"text_config": ("SiglipTextConfig", SIZES), "vision_config": ("SiglipVisionConfig", VISION)},
    ),
    "qwen2-vl": Architecture(
        "Qwen2VL", "ForConditionalGeneration", picture_and_text,
        {"image_token_id": 95, "vision_start_token_id": 96, "vision_end_token_id": 97, "video_token_id": 98},
        {
            "text_config": ("Qwen2VLTextConfig", {**SIZES, **FEW_HEADS, **ROTARY}),
            "vision_config": ("Qwen2VLVisionConfig", {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4,
            "patch_size": 4, "mlp_ratio": 2}),
        },
    ),
    "llava": Architecture(
        "Llava", "ForConditionalGeneration", picture_tokens,
        {"image_token_index": 95, "image_token_id": 95, "vision_feature_layer": -1, "vision_feature_select_strategy": "default"},
        {"text_config": ("LlamaConfig", {**SIZES, **FEW_HEADS}), "vision_config": ("CLIPVisionConfig", VISION)},
    ),
}  # fmt: skip

HEARING: dict[str, Architecture] = {
    "wav2vec2-ctc": speech("Wav2Vec2", "ForCTC", transcribe),
    "wav2vec2-ctc-padded": speech("Wav2Vec2", "ForCTC", transcribe_padded, feat_extract_norm="layer"),
    "wav2vec2-classify": speech("Wav2Vec2", "ForSequenceClassification", recognise),
    "hubert-ctc": speech("Hubert", "ForCTC", transcribe),
    "hubert-classify": speech("Hubert", "ForSequenceClassification", recognise, use_weighted_layer_sum=True),
    "wavlm-classify": speech("WavLM", "ForSequenceClassification", recognise),
    "unispeech-ctc": speech("UniSpeech", "ForCTC", transcribe),
    "sew-ctc": speech("SEW", "ForCTC", transcribe, squeeze_factor=2),
    "audio-spectrogram": vision(
        "AST", "ForAudioClassification", sounds, max_length=64, num_mel_bins=16, patch_size=8, frequency_stride=8, time_stride=8,
    ),
}  # fmt: skip

TRANSFORMERS: dict[str, Case] = {
    name: Case(architecture.make, group)
    for group, architectures in (
        ("transformers: encoders", ENCODERS),
        ("transformers: decoders", DECODERS),
        ("transformers: sequence to sequence", SEQUENCES),
        ("transformers: vision", SIGHT),
        ("transformers: speech", HEARING),
    )
    for name, architecture in architectures.items()
}
