"""Tiny models of transformers for `graphopt bench breadth`: sequence to sequence, vision, speech, and those for text alone."""

from __future__ import annotations

import torch

from graphopt.bench.breadth_inputs import (
    BATCH,
    FEW_HEADS,
    SEQUENCE,
    SIZES,
    T5,
    VISION,
    VOCABULARY,
    Architecture,
    boxes,
    mask_patches,
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
    transcribe,
    transcribe_padded,
    translate,
    vision,
)
from graphopt.bench.breadth_run import Case
from graphopt.bench.breadth_text import DECODERS, ENCODERS

ROTARY = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}

SEQUENCES: dict[str, Architecture] = {
    "t5": Architecture("T5Config", "T5ForConditionalGeneration", translate, T5),
    "mt5": Architecture("MT5Config", "MT5ForConditionalGeneration", translate, {**T5, "feed_forward_proj": "gated-gelu"}),
    "umt5": Architecture("UMT5Config", "UMT5ForConditionalGeneration", translate, T5),
    "longt5": Architecture("LongT5Config", "LongT5ForConditionalGeneration", translate, {**T5, "local_radius": 3}),
    "switch-transformers": Architecture(
        "SwitchTransformersConfig", "SwitchTransformersForConditionalGeneration", translate,
        {
            **T5, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "num_experts": 4, "expert_capacity": 8,
            "router_jitter_noise": 0.0,
        },
    ),
    "bart": sequences("BartConfig", "BartForConditionalGeneration"),
    "bart-cached": sequences("BartConfig", "BartForConditionalGeneration", lambda c: {**translate(c), "use_cache": True}),
    "mbart": sequences("MBartConfig", "MBartForConditionalGeneration"),
    "pegasus": sequences("PegasusConfig", "PegasusForConditionalGeneration"),
    "marian": sequences("MarianConfig", "MarianMTModel"),
    "m2m100": sequences("M2M100Config", "M2M100ForConditionalGeneration"),
    "blenderbot": sequences("BlenderbotConfig", "BlenderbotForConditionalGeneration"),
    "plbart": sequences("PLBartConfig", "PLBartForConditionalGeneration"),
    "led": sequences(
        "LEDConfig", "LEDForConditionalGeneration", attention_window=8, max_encoder_position_embeddings=64,
        max_decoder_position_embeddings=64,
    ),
    "bigbird-pegasus": sequences(
        "BigBirdPegasusConfig", "BigBirdPegasusForConditionalGeneration", attention_type="original_full",
    ),
    "prophetnet": Architecture(
        "ProphetNetConfig", "ProphetNetForConditionalGeneration", translate,
        {
            "vocab_size": VOCABULARY, "hidden_size": 32, "num_encoder_layers": 2, "num_decoder_layers": 2,
            "num_encoder_attention_heads": 4,
            "num_decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "ngram": 2, "num_buckets": 8,
            "relative_max_distance": 16, "max_position_embeddings": 64, "decoder_start_token_id": 1,
        },
    ),
    "whisper": Architecture(
        "WhisperConfig", "WhisperForConditionalGeneration", spectra,
        {**SEQUENCE, "num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 32},
    ),
    "whisper-classify": Architecture(
        "WhisperConfig", "WhisperForAudioClassification", spectra_labels,
        {**SEQUENCE, "num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 32, "use_weighted_layer_sum": True},
    ),
}  # fmt: skip

SIGHT: dict[str, Architecture] = {
    "vit": vision("ViTConfig", "ViTForImageClassification"),
    "deit": vision("DeiTConfig", "DeiTForImageClassification"),
    "beit": vision("BeitConfig", "BeitForImageClassification", use_relative_position_bias=True),
    "beit-masked": vision(
        "BeitConfig", "BeitForMaskedImageModeling", lambda c: {**mask_patches(c), "labels": torch.randint(0, 50, (12,))},
        vocab_size=50, use_mask_token=True,
    ),
    "vit-mae": vision(
        "ViTMAEConfig", "ViTMAEForPreTraining", lambda c: {"pixel_values": torch.randn(BATCH, 3, 32, 32)},
        decoder_hidden_size=32, decoder_num_hidden_layers=1, decoder_num_attention_heads=4, decoder_intermediate_size=64,
    ),
    "dinov2": vision("Dinov2Config", "Dinov2ForImageClassification"),
    "swin": pyramid(
        "SwinConfig", "SwinForImageClassification", embed_dim=16, depths=[2, 1], num_heads=[2, 4], window_size=2, patch_size=4,
    ),
    "swinv2": pyramid(
        "Swinv2Config", "Swinv2ForImageClassification", embed_dim=16, depths=[2, 1], num_heads=[2, 4], window_size=2,
        patch_size=4,
    ),
    "convnext": pyramid(
        "ConvNextConfig", "ConvNextForImageClassification", hidden_sizes=[16, 32], depths=[1, 1], num_stages=2, patch_size=4,
    ),
    "convnextv2": pyramid(
        "ConvNextV2Config", "ConvNextV2ForImageClassification", hidden_sizes=[16, 32], depths=[1, 1], num_stages=2, patch_size=4,
    ),
    "resnet": pyramid("ResNetConfig", "ResNetForImageClassification", embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1]),
    "regnet": pyramid(
        "RegNetConfig", "RegNetForImageClassification", embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], groups_width=8,
    ),
    "mobilenet-v2": pyramid("MobileNetV2Config", "MobileNetV2ForImageClassification", depth_multiplier=0.25, min_depth=4),
    "mobilevit": pyramid(
        "MobileViTConfig", "MobileViTForImageClassification", image_size=64, patch_size=2, hidden_sizes=[16, 24, 32],
        neck_hidden_sizes=[8, 8, 16, 16, 24, 32, 32],
    ),
    "efficientnet": pyramid(
        "EfficientNetConfig", "EfficientNetForImageClassification", width_coefficient=0.25, depth_coefficient=0.25,
        hidden_dim=320,
    ),
    "segformer": pyramid(
        "SegformerConfig", "SegformerForSemanticSegmentation", segments, hidden_sizes=[8, 16], depths=[1, 1],
        num_attention_heads=[1, 2], sr_ratios=[2, 1], patch_sizes=[3, 3], strides=[2, 2], num_encoder_blocks=2,
        decoder_hidden_size=16, mlp_ratios=[2, 2],
    ),
    "poolformer": pyramid(
        "PoolFormerConfig", "PoolFormerForImageClassification", hidden_sizes=[8, 16], depths=[1, 1], patch_sizes=[3, 3],
        strides=[2, 2], padding=[1, 1], num_encoder_blocks=2, mlp_ratio=2.0,
    ),
    "pvt": pyramid("PvtConfig", "PvtForImageClassification", image_size=64),
    "levit": pyramid(
        "LevitConfig", "LevitForImageClassification", image_size=64, hidden_sizes=[16, 24, 32], num_attention_heads=[2, 3, 4],
        depths=[1, 1, 1], key_dim=[8, 8, 8],
    ),
    "yolos": vision("YolosConfig", "YolosForObjectDetection", boxes, image_size=[64, 64], num_detection_tokens=6),
    "detr": Architecture(
        "DetrConfig", "DetrForObjectDetection", boxes,
        {
            "d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_queries": 6, "num_labels": 5, "use_timm_backbone": False,
            "use_pretrained_backbone": False, "backbone": None, "auxiliary_loss": True,
        },
        {"backbone_config": ("ResNetConfig", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1],
        "out_features": ["stage2"]})},
    ),
    "clip": Architecture(
        "CLIPConfig", "CLIPModel", pairs, {"projection_dim": 16},
        {
            "text_config": ("CLIPTextConfig", {**SIZES, "eos_token_id": VOCABULARY - 1}),
            "vision_config": ("CLIPVisionConfig", VISION),
        },
    ),
    "siglip": Architecture(
        "SiglipConfig", "SiglipModel", pairs, {},
        {"text_config": ("SiglipTextConfig", SIZES), "vision_config": ("SiglipVisionConfig", VISION)},
    ),
    "qwen2-vl": Architecture(
        "Qwen2VLConfig", "Qwen2VLForConditionalGeneration", picture_and_text,
        {"image_token_id": 95, "vision_start_token_id": 96, "vision_end_token_id": 97, "video_token_id": 98},
        {
            "text_config": ("Qwen2VLTextConfig", {**SIZES, **FEW_HEADS, **ROTARY}),
            "vision_config": ("Qwen2VLVisionConfig", {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4,
            "patch_size": 4, "mlp_ratio": 2}),
        },
    ),
    "llava": Architecture(
        "LlavaConfig", "LlavaForConditionalGeneration", picture_tokens,
        {"image_token_index": 95, "image_token_id": 95, "vision_feature_layer": -1, "vision_feature_select_strategy": "default"},
        {"text_config": ("LlamaConfig", {**SIZES, **FEW_HEADS}), "vision_config": ("CLIPVisionConfig", VISION)},
    ),
}  # fmt: skip

HEARING: dict[str, Architecture] = {
    "wav2vec2-ctc": speech("Wav2Vec2Config", "Wav2Vec2ForCTC", transcribe),
    "wav2vec2-ctc-padded": speech("Wav2Vec2Config", "Wav2Vec2ForCTC", transcribe_padded, feat_extract_norm="layer"),
    "wav2vec2-classify": speech("Wav2Vec2Config", "Wav2Vec2ForSequenceClassification", recognise),
    "hubert-ctc": speech("HubertConfig", "HubertForCTC", transcribe),
    "hubert-classify": speech("HubertConfig", "HubertForSequenceClassification", recognise, use_weighted_layer_sum=True),
    "wavlm-classify": speech("WavLMConfig", "WavLMForSequenceClassification", recognise),
    "unispeech-ctc": speech("UniSpeechConfig", "UniSpeechForCTC", transcribe),
    "sew-ctc": speech("SEWConfig", "SEWForCTC", transcribe, squeeze_factor=2),
    "audio-spectrogram": vision(
        "ASTConfig", "ASTForAudioClassification", sounds, max_length=64, num_mel_bins=16, patch_size=8, frequency_stride=8,
        time_stride=8,
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
