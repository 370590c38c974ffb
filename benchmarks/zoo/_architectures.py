"""Which architectures of transformers the zoo tries, by task."""

from __future__ import annotations

from typing import Any

import torch

from zoo._batches import (
    IMAGE,
    TOKENS,
    answers,
    boxes,
    captions,
    channels,
    frames,
    masks,
    mel,
    pages,
    pairs,
    pixels,
    pixels_alone,
    same,
    segments,
    sentence,
    sequences,
    series,
    wave,
)
from zoo._subject import BATCH, classes
from zoo._tiny import HIDDEN, Tiny, part

_SPEECH: dict[str, Any] = {
    "conv_dim": (32, 32, 32),
    "conv_kernel": (10, 3, 2),
    "conv_stride": (5, 3, 2),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "mask_time_length": 4,
    "ctc_zero_infinity": True,
    "vocab_size": 32,
}
_SERIES: dict[str, Any] = {
    "prediction_length": 8,
    "context_length": 16,
    "lags_sequence": list(range(1, 13)),
    "num_time_features": 2,
    "d_model": 16,
}
_STAGES = {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 24, 32, 48], "embedding_size": 16}
_RESNET: dict[str, Any] = {**_STAGES, "layer_type": "basic", "out_features": ["stage1", "stage2", "stage3", "stage4"]}
_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}


def _detector(kind: str, **options: Any) -> dict[str, Any]:
    """A detector over a tiny ResNet."""

    def config() -> Any:
        backbone = part("ResNetConfig", **(_RESNET | options.get("resnet", {})))
        rest = {key: value for key, value in options.items() if key != "resnet"}
        return part(kind, backbone_config=backbone, num_queries=12, **rest)

    return {"config": config}


_TEXT = {
    "gpt2": Tiny("GPT2LMHeadModel", same()),
    "gpt_neo": Tiny("GPTNeoForCausalLM", same(), {"attention_types": [[["global", "local"], 1]], "window_size": 8}),
    "gpt_neox": Tiny("GPTNeoXForCausalLM", same()),
    "gptj": Tiny("GPTJForCausalLM", same(), {"rotary_dim": 8}),
    "opt": Tiny("OPTForCausalLM", same()),
    "bloom": Tiny("BloomForCausalLM", same()),
    "codegen": Tiny("CodeGenForCausalLM", same(), {"rotary_dim": 8}),
    "ctrl": Tiny("CTRLLMHeadModel", same()),
    "xglm": Tiny("XGLMForCausalLM", same()),
    "biogpt": Tiny("BioGptForCausalLM", same()),
    "llama": Tiny("LlamaForCausalLM", same()),
    "mistral": Tiny("MistralForCausalLM", same(), {"sliding_window": 8}),
    "qwen2": Tiny("Qwen2ForCausalLM", same()),
    "qwen3": Tiny("Qwen3ForCausalLM", same()),
    "gemma2": Tiny("Gemma2ForCausalLM", same()),
    "gemma3": Tiny("Gemma3ForCausalLM", same()),
    "phi": Tiny("PhiForCausalLM", same()),
    "phi3": Tiny("Phi3ForCausalLM", same()),
    "falcon": Tiny("FalconForCausalLM", same(), {"head_dim": None}),
    "olmo2": Tiny("Olmo2ForCausalLM", same()),
    "cohere": Tiny("CohereForCausalLM", same()),
    "mpt": Tiny("MptForCausalLM", same()),
    "xlnet": Tiny("XLNetLMHeadModel", same(), {"d_inner": 128, "max_position_embeddings": None}),
    "reformer": Tiny(
        "ReformerModelWithLMHead",
        same(),
        {
            "is_decoder": True,
            "attn_layers": ["local", "lsh"],
            "local_attn_chunk_length": 8,
            "lsh_attn_chunk_length": 8,
            "attention_head_size": 16,
            "axial_pos_shape": (4, 8),
            "axial_pos_embds_dim": (32, 32),
            "feed_forward_size": 64,
            "num_buckets": 4,
        },
    ),
    "mixtral": Tiny("MixtralForCausalLM", same(), _EXPERTS | {"output_router_logits": True}),
    "qwen2_moe": Tiny("Qwen2MoeForCausalLM", same(), _EXPERTS | {"output_router_logits": True}),
    "olmoe": Tiny("OlmoeForCausalLM", same(), _EXPERTS),
    "gpt_oss": Tiny("GptOssForCausalLM", same(), _EXPERTS),
    "deepseek_v3": Tiny(
        "DeepseekV3ForCausalLM",
        same(),
        _EXPERTS
        | {
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 32,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 16,
            "num_key_value_heads": 4,
            "head_dim": None,
        },
    ),
    "mamba": Tiny("MambaForCausalLM", same(), {"intermediate_size": None}),
    "mamba2": Tiny(
        "Mamba2ForCausalLM",
        same(),
        {"num_heads": 8, "head_dim": 16, "n_groups": 1, "state_size": 16, "chunk_size": 16, "expand": 2},
    ),
    "falcon_mamba": Tiny("FalconMambaForCausalLM", same(), {"intermediate_size": None}),
    "recurrent_gemma": Tiny("RecurrentGemmaForCausalLM", same(), {"num_hidden_layers": 3, "attention_window_size": 16}),
    "rwkv": Tiny("RwkvForCausalLM", same(), {"attention_hidden_size": HIDDEN}),
    "bert": Tiny("BertForMaskedLM", same()),
    "roberta": Tiny("RobertaForMaskedLM", same()),
    "albert": Tiny("AlbertForMaskedLM", same()),
    "electra": Tiny("ElectraForMaskedLM", same()),
    "distilbert": Tiny("DistilBertForMaskedLM", same()),
    "deberta": Tiny("DebertaForMaskedLM", same(), {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
    "deberta_v2": Tiny("DebertaV2ForMaskedLM", same(), {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
    "mobilebert": Tiny("MobileBertForMaskedLM", same(), {"intra_bottleneck_size": 32, "true_hidden_size": 32}),
    "squeezebert": Tiny("SqueezeBertForMaskedLM", same()),
    "funnel": Tiny(
        "FunnelForMaskedLM",
        same(),
        {"block_sizes": [1, 1], "num_decoder_layers": 1, "d_inner": 128, "num_hidden_layers": None},
    ),
    "convbert": Tiny("ConvBertForMaskedLM", same()),
    "fnet": Tiny("FNetForMaskedLM", same()),
    "nystromformer": Tiny("NystromformerForMaskedLM", same(), {"num_landmarks": 8, "segment_means_seq_len": TOKENS}),
    "big_bird": Tiny(
        "BigBirdForMaskedLM", same(64), {"block_size": 4, "num_random_blocks": 2, "max_position_embeddings": 128}
    ),
    "longformer": Tiny("LongformerForMaskedLM", same(), {"attention_window": 8}),
    "xlm": Tiny("XLMWithLMHeadModel", same()),
    "mpnet": Tiny("MPNetForMaskedLM", same()),
    "roformer": Tiny("RoFormerForMaskedLM", same()),
    "rembert": Tiny("RemBertForMaskedLM", same(), {"input_embedding_size": 32, "output_embedding_size": 32}),
    "ibert": Tiny("IBertForMaskedLM", same()),
    "esm": Tiny("EsmForMaskedLM", same(), {"mask_token_id": 4}),
    "modernbert": Tiny("ModernBertForMaskedLM", same()),
    "canine": Tiny("CanineForSequenceClassification", sentence, {"vocab_size": None, "local_transformer_stride": 16}),
    "t5": Tiny("T5ForConditionalGeneration", sequences),
    "bart": Tiny("BartForConditionalGeneration", sequences),
    "led": Tiny("LEDForConditionalGeneration", sequences, {"attention_window": 8}),
    "longt5": Tiny("LongT5ForConditionalGeneration", sequences, {"local_radius": 8}),
    "pegasus_x": Tiny("PegasusXForConditionalGeneration", sequences, {"block_size": 8, "num_global_tokens": 4}),
    "prophetnet": Tiny(
        "ProphetNetForConditionalGeneration",
        sequences,
        {
            "num_encoder_layers": 2,
            "num_hidden_layers": None,
            "num_encoder_attention_heads": 2,
            "num_decoder_attention_heads": 2,
        },
    ),
    "switch_transformers": Tiny(
        "SwitchTransformersForConditionalGeneration", sequences, {"num_experts": 4, "expert_capacity": 16}
    ),
    "marian": Tiny("MarianMTModel", sequences),
    "m2m_100": Tiny("M2M100ForConditionalGeneration", sequences),
    "bigbird_pegasus": Tiny("BigBirdPegasusForConditionalGeneration", sequences, {"attention_type": "original_full"}),
    "nllb_moe": Tiny("NllbMoeForConditionalGeneration", sequences, {"num_experts": 4, "encoder_sparse_step": 2}),
}
_SOUND = {
    "wav2vec2": Tiny("Wav2Vec2ForCTC", wave, _SPEECH),
    "hubert": Tiny("HubertForCTC", wave, _SPEECH),
    "wavlm": Tiny("WavLMForCTC", wave, _SPEECH),
    "sew": Tiny("SEWForCTC", wave, _SPEECH | {"squeeze_factor": 2}),
    "unispeech_sat": Tiny("UniSpeechSatForCTC", wave, _SPEECH),
    "wav2vec2_conformer": Tiny("Wav2Vec2ConformerForCTC", wave, _SPEECH),
    "whisper": Tiny(
        "WhisperForConditionalGeneration", mel(80, 100), {"max_source_positions": 50, "max_target_positions": 64}
    ),
    "audio_spectrogram_transformer": Tiny(
        "ASTForAudioClassification",
        lambda _config: {"input_values": torch.randn(BATCH, 64, 32), "labels": classes()},
        {"max_length": 64, "num_mel_bins": 32},
    ),
}
_SIGHT = {
    "vit": Tiny("ViTForImageClassification", pixels()),
    "deit": Tiny("DeiTForImageClassification", pixels()),
    "beit": Tiny("BeitForImageClassification", pixels()),
    "swin": Tiny(
        "SwinForImageClassification",
        pixels(),
        {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4},
    ),
    "swinv2": Tiny(
        "Swinv2ForImageClassification",
        pixels(),
        {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4},
    ),
    "convnextv2": Tiny(
        "ConvNextV2ForImageClassification",
        pixels(),
        {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 24, 32, 48], "num_hidden_layers": None},
    ),
    "resnet": Tiny("ResNetForImageClassification", pixels(), _STAGES),
    "mobilenet_v2": Tiny("MobileNetV2ForImageClassification", pixels(), {"depth_multiplier": 0.35}),
    "mobilevit": Tiny(
        "MobileViTForImageClassification",
        pixels(),
        {"hidden_sizes": [24, 32, 48], "neck_hidden_sizes": [8, 16, 24, 32, 48, 48, 64], "num_attention_heads": 4},
    ),
    "poolformer": Tiny(
        "PoolFormerForImageClassification", pixels(), {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 24, 32, 48]}
    ),
    "pvt": Tiny(
        "PvtForImageClassification",
        pixels(),
        {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 40, 64], "num_attention_heads": None},
    ),
    "segformer": Tiny(
        "SegformerForSemanticSegmentation",
        segments,
        {
            "depths": [1, 1, 1, 1],
            "hidden_sizes": [16, 32, 40, 64],
            "num_attention_heads": None,
            "decoder_hidden_size": 32,
        },
    ),
    "dinov2": Tiny("Dinov2ForImageClassification", pixels(), {"patch_size": 16}),
    "levit": Tiny("LevitForImageClassification", pixels(224), {"image_size": 224}),
    "vit_mae": Tiny(
        "ViTMAEForPreTraining",
        pixels_alone,
        {
            "decoder_hidden_size": 32,
            "decoder_num_hidden_layers": 1,
            "decoder_num_attention_heads": 2,
            "decoder_intermediate_size": 64,
        },
    ),
    "videomae": Tiny("VideoMAEForVideoClassification", frames, {"num_frames": 4}),
    "timesformer": Tiny("TimesformerForVideoClassification", frames, {"num_frames": 4}),
    "detr": Tiny("DetrForObjectDetection", boxes, _detector("DetrConfig", auxiliary_loss=True)),
    "conditional_detr": Tiny("ConditionalDetrForObjectDetection", boxes, _detector("ConditionalDetrConfig")),
    "deformable_detr": Tiny("DeformableDetrForObjectDetection", boxes, _detector("DeformableDetrConfig")),
    "rt_detr": Tiny(
        "RTDetrForObjectDetection",
        boxes,
        _detector(
            "RTDetrConfig",
            resnet={"out_features": ["stage2", "stage3", "stage4"]},
            encoder_in_channels=[24, 32, 48],
            encoder_hidden_dim=HIDDEN,
            decoder_in_channels=[HIDDEN] * 3,
            num_denoising=4,
        ),
    ),
    "yolos": Tiny("YolosForObjectDetection", boxes, {"image_size": [IMAGE, IMAGE], "num_detection_tokens": 12}),
    "mask2former": Tiny(
        "Mask2FormerForUniversalSegmentation",
        masks,
        {
            "config": lambda: part(
                "Mask2FormerConfig",
                backbone_config=part(
                    "SwinConfig",
                    embed_dim=16,
                    depths=[1, 1, 1, 1],
                    num_heads=[2, 2, 2, 2],
                    window_size=4,
                    out_features=["stage1", "stage2", "stage3", "stage4"],
                ),
                feature_size=32,
                mask_feature_size=32,
                hidden_dim=32,
                encoder_feedforward_dim=64,
                dim_feedforward=64,
                decoder_layers=3,
                num_queries=8,
                train_num_points=256,
            )
        },
    ),
    "maskformer": Tiny(
        "MaskFormerForInstanceSegmentation",
        masks,
        {
            "config": lambda: part(
                "MaskFormerConfig",
                fpn_feature_size=32,
                mask_feature_size=32,
                backbone_config=part(
                    "SwinConfig",
                    embed_dim=16,
                    depths=[1, 1, 1, 1],
                    num_heads=[2, 2, 2, 2],
                    window_size=4,
                    out_features=["stage1", "stage2", "stage3", "stage4"],
                ),
                decoder_config=part("DetrConfig", num_queries=8, d_model=32),
            )
        },
    ),
}
_BOTH = {
    "clip": Tiny(
        "CLIPModel",
        pairs,
        {
            "config": lambda: part(
                "CLIPConfig",
                text_config=part("CLIPTextConfig").to_dict(),
                vision_config=part("CLIPVisionConfig", patch_size=16).to_dict(),
                projection_dim=32,
            )
        },
    ),
    "siglip": Tiny(
        "SiglipModel",
        pairs,
        {
            "config": lambda: part(
                "SiglipConfig",
                text_config=part("SiglipTextConfig").to_dict(),
                vision_config=part("SiglipVisionConfig", patch_size=16).to_dict(),
            )
        },
    ),
    "vilt": Tiny("ViltForQuestionAnswering", answers, {"patch_size": 16}),
    "git": Tiny(
        "GitForCausalLM",
        captions,
        {"config": lambda: part("GitConfig", vision_config=part("GitVisionConfig", patch_size=16).to_dict())},
    ),
    "blip": Tiny(
        "BlipForConditionalGeneration",
        captions,
        {
            "config": lambda: part(
                "BlipConfig",
                text_config=part("BlipTextConfig", encoder_hidden_size=HIDDEN).to_dict(),
                vision_config=part("BlipVisionConfig", patch_size=16).to_dict(),
            )
        },
    ),
    "layoutlm": Tiny("LayoutLMForTokenClassification", pages, {"max_2d_position_embeddings": 128}),
}
_TIME = {
    "patchtst": Tiny(
        "PatchTSTForPrediction",
        channels,
        {"num_input_channels": 3, "context_length": 32, "patch_length": 4, "patch_stride": 4, "prediction_length": 8},
    ),
    "patchtsmixer": Tiny(
        "PatchTSMixerForPrediction",
        channels,
        {"num_input_channels": 3, "context_length": 32, "patch_length": 4, "patch_stride": 4, "prediction_length": 8},
    ),
    "time_series_transformer": Tiny("TimeSeriesTransformerForPrediction", series, _SERIES),
    "informer": Tiny("InformerForPrediction", series, _SERIES),
    "autoformer": Tiny("AutoformerForPrediction", series, _SERIES | {"label_length": 4}),
}
ZOO: dict[str, Tiny] = {**_TEXT, **_SOUND, **_SIGHT, **_BOTH, **_TIME}
