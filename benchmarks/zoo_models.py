"""The models of ``zoo.py``: of timm by name, of transformers by class, all of them small and untrained.

A model of timm is built at the least image size at which all of its stages have something to do. A model of
transformers is made tiny by the sizes of ``TINY`` that its configuration knows, and by what ``TRANSFORMERS`` says of
it. Nothing is downloaded.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

IMAGES, TINY_IMAGES, SEQUENCES, TOKENS = 4, 16, 8, 64
"""Images of a batch for models of timm and of transformers, sequences of a batch, and tokens of a sequence."""
CLASSES = 10


@dataclass
class Sample:
    """A model in training mode and a batch for it.

    Args:
        model: The model.
        args: What it is called with.
        kwargs: What it is called with by name.
        loss: Of what it returns.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[[Any], Tensor]

    def inputs(self) -> list[Tensor]:
        """Return the tensors of the batch."""
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]


IMAGE_SIZE = 96
_TIMM = """
    botnet26t_256 caformer_s18 cait_xxs24_224 coat_lite_tiny coat_tiny coatnet_pico_rw_224 coatnext_nano_rw_224
    convformer_s18 convit_tiny convnext_atto convnext_zepto_rms convnextv2_atto cpubone_nano cs3darknet_focus_s
    cs3darknet_s csatv2 cspdarknet53 cspnext_tiny cspresnet50 cspresnext50 darknet17 darknetaa53 davit_tiny
    deit3_small_patch16_224 deit_tiny_distilled_patch16_224 deit_tiny_patch16_224 densenet121 densenetblur121d dla34
    dla46x_c dm_nfnet_f0 dpn48b eca_botnext26ts_256 eca_nfnet_l0 eca_resnext26ts eca_vovnet39b ecaresnet26t
    ecaresnext26t_32x4d edgenext_xx_small efficientformerv2_s0 efficientnet_b0 efficientnet_es efficientnet_lite0
    efficientnetv2_rw_t efficientvim_m1 efficientvit_b0 ese_vovnet19b_slim_dw eva02_tiny_patch14_224 fasternet_t0
    fastvit_t8 fbnetc_100 fbnetv3_b flexivit_small focalnet_tiny_srf gc_efficientnetv2_rw_t gcresnext26ts
    gcvit_xxtiny gernet_s ghostnet_050 ghostnetv2_100 ghostnetv3_050 gmixer_12_224 gmlp_ti16_224 hardcorenas_a
    hgnet_tiny hgnetv2_b0 hiera_tiny_224 hieradet_small hrnet_w18_small iformer_t inception_next_atto
    lambda_resnet26t lcnet_050 lcnetv2_small legacy_seresnet18 legacy_xception levit_128s levit_conv_128s
    lowformer_b0 mambaout_femto maxvit_pico_rw_256 maxxvit_rmlp_nano_rw_256 maxxvitv2_nano_rw_256 mixer_s32_224
    mixnet_s mnasnet_small mobilenet_edgetpu_100 mobilenetv2_035 mobilenetv3_small_050 mobilenetv4_conv_small_050
    mobilenetv4_hybrid_medium mobilenetv5_base mobileone_s1 mobilevit_xxs mobilevitv2_050 mvitv2_tiny
    naflexvit_base_patch16_gap nest_tiny nextvit_small nf_regnet_b0 nf_resnet26 pit_ti_224 pnasnet5large
    poolformer_s12 poolformerv2_s12 pvt_v2_b0 rdnet_tiny regnetv_040 regnetx_002 regnety_002 regnetz_005 regnetz_b16
    repghostnet_050 repvgg_a0 repvit_m0_9 res2net50_14w_8s res2next50 resmlp_12_224 resnest14d resnet10t resnet18
    resnet26d resnet32ts resnet50_gn resnetaa34d resnetblur18 resnetv2_18 resnetv2_50x1_bit resnext50_32x4d
    rexnet_100 sam2_hiera_tiny sedarknet21 selecsls42 semnasnet_050 sequencer2d_s seresnet18 seresnext26d_32x4d
    shvit_s1 skresnet18 spnasnet_100 starnet_s050 swiftformer_xs swin_tiny_patch4_window7_224 swinv2_cr_tiny_224
    swinv2_cr_tiny_ns_224 swinv2_tiny_window8_256 test_byobnet test_coatnet test_convnext test_efficientnet
    test_mambaout test_nfnet test_vit tf_efficientnetv2_b0 tf_mixnet_s tf_mobilenetv3_small_075 tiny_vit_5m_224
    tinynet_e tnt_s_legacy_patch16_224 tresnet_m twins_pcpvt_small twins_svt_small visformer_tiny
    vit_little_patch16_reg1_gap_256 vit_medium_patch16_gap_240 vit_pe_core_tiny_patch16_384
    vit_pwee_patch16_reg1_gap_256 vit_relpos_small_patch16_rpn_224 vit_small_r26_s32_224
    vit_srelpos_small_patch16_224 vit_tiny_patch16_224 vit_tiny_patch16_dinov3_qkvb vit_tiny_r_s16_p8_224
    vit_wee_patch16_reg1_gap_256 vitamin_small_224 volo_d1_224 vovnet39a wide_resnet50_2 xception41 xception41p
    xcit_nano_12_p16_224
"""
_TIMM_BASE = """
    beit3_base_patch16_224 beit_base_patch16_224 gemma4_vit_167m qwen3_vit_88m samvit_base_patch16_224 vit_base_mci_224
    vit_base_patch16_rope_224 vit_base_patch16_siglip_224
"""
TIMM: dict[str, dict[str, Any]] = {
    **{name: {} for name in _TIMM.split()},
    # At fewer pixels the last stage has nothing to do, or what it was made for does not fit.
    **{name: {"img_size": 128} for name in ("efficientvit_m0", "lamhalobotnet50ts_256")},
    **{name: {"img_size": 160} for name in ("inception_resnet_v2", "inception_v3", "inception_v4")},
    **{name: {"img_size": 224} for name in ("efficientformer_l1", "haloregnetz_b")},
    **{name: {"img_size": 256} for name in ("bat_resnext26ts", "halonet26t", "swinv2_tiny_window8_256")},
    "crossvit_tiny_240": {"img_size": 240},
    # Of what there is no small one of, a part.
    **{name: {"depth": 4} for name in _TIMM_BASE.split()},
    **{name: {"depth": 2} for name in ("aimv2_large_patch14_224", "vit_huge_patch14_xp_224")},
    **{"convmixer_768_32": {}, "nasnetalarge": {"num_features": 1056}, "vgg11_bn": {"mlp_ratio": 0.25}},
}
"""Models of timm, and how each is built beside ``IMAGE_SIZE``."""


def timm_sample(name: str, built: dict[str, Any]) -> Sample:
    """Return a model of timm, and images for it."""
    import timm

    arguments = {"num_classes": CLASSES} | built
    size = arguments.pop("img_size", IMAGE_SIZE)
    try:
        model = timm.create_model(name, img_size=size, **arguments)
    except TypeError:  # made for images of any size
        model = timm.create_model(name, **arguments)
    labels = torch.arange(IMAGES) % CLASSES

    def loss(output: Any) -> Tensor:
        return F.cross_entropy(output[0] if isinstance(output, (list, tuple)) else output, labels)

    return Sample(model.train(), (torch.randn(IMAGES, 3, size, size),), {}, loss)


VOCABULARY, WIDTH, HEADS = 512, 128, 4
TINY: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "src_vocab_size", "tgt_vocab_size"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embedding_size"), WIDTH),
    **dict.fromkeys(("intermediate_size", "d_ff", "ffn_dim", "hidden_dim", "ffn_hidden_size"), 2 * WIDTH),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 2 * WIDTH),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "num_decoder_layers", "n_layer", "n_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "n_heads"), HEADS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), HEADS),
    **{"num_key_value_heads": 2, "head_dim": WIDTH // HEADS, "d_kv": WIDTH // HEADS},
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 2 * TOKENS),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **{"num_experts_per_tok": 2, "moe_intermediate_size": WIDTH, "shared_expert_intermediate_size": WIDTH},
    **{"image_size": 64, "patch_size": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False},
}
"""Sizes of a tiny model, by all the names that configurations have for them."""


@dataclass(frozen=True)
class Tiny:
    """How a model of transformers is made tiny, beside ``TINY``.

    Args:
        sizes: Arguments of its configuration.
        shape: Of its input, where it is not what its kind of input has; ``None`` for that.
    """

    sizes: dict[str, Any] = field(default_factory=dict)
    shape: tuple[int, ...] | None = None


_STAGES = {"hidden_sizes": [32, 64, 96, 128], "depths": [1, 1, 1, 1]}
_WINDOWS = {"embed_dim": 64, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "patch_size": 4}
_PYRAMID = {"hidden_sizes": [32, 64], "depths": [1, 1], "num_attention_heads": [1, 2], "num_encoder_blocks": 2}
_LATENT = {"q_lora_rank": 64, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32}
_ONE_GROUP = {"n_group": 1, "topk_group": 1, "num_key_value_heads": HEADS}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_chunk_size": 32}
_START = {"decoder_start_token_id": 0}
_SPEECH = {"conv_dim": [64, 64], "conv_kernel": [10, 3], "conv_stride": [5, 4], "num_feat_extract_layers": 2}
_SPEECH |= {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "mask_time_prob": 0.0}
_TRANSFORMERS = """
    LlamaForCausalLM MistralForCausalLM MixtralForCausalLM Qwen2ForCausalLM Qwen2MoeForCausalLM Qwen3ForCausalLM
    Qwen3MoeForCausalLM Qwen3NextForCausalLM GemmaForCausalLM Gemma2ForCausalLM Gemma3ForCausalLM OlmoForCausalLM
    Olmo2ForCausalLM Olmo3ForCausalLM OlmoeForCausalLM PhiForCausalLM Phi3ForCausalLM PhimoeForCausalLM
    StableLmForCausalLM Starcoder2ForCausalLM CohereForCausalLM Cohere2ForCausalLM GlmForCausalLM Glm4ForCausalLM
    Glm4MoeForCausalLM GraniteForCausalLM GraniteMoeForCausalLM HeliumForCausalLM SmolLM3ForCausalLM
    DiffLlamaForCausalLM JambaForCausalLM  MambaForCausalLM
    FalconMambaForCausalLM RwkvForCausalLM xLSTMForCausalLM RecurrentGemmaForCausalLM NemotronForCausalLM
    PersimmonForCausalLM GPT2LMHeadModel GPTNeoXForCausalLM GPTBigCodeForCausalLM OPTForCausalLM BloomForCausalLM
    FalconForCausalLM MptForCausalLM OpenAIGPTLMHeadModel XGLMForCausalLM BioGptForCausalLM JetMoeForCausalLM
    GptOssForCausalLM Llama4ForCausalLM MiniMaxForCausalLM Lfm2ForCausalLM Ernie4_5ForCausalLM
    HunYuanDenseV1ForCausalLM Exaone4ForCausalLM ArceeForCausalLM ApertusForCausalLM BitNetForCausalLM
    DogeForCausalLM SeedOssForCausalLM ModernBertDecoderForCausalLM NanoChatForCausalLM VaultGemmaForCausalLM
    FlexOlmoForCausalLM AfmoeForCausalLM BertForMaskedLM RobertaForMaskedLM AlbertForMaskedLM DistilBertForMaskedLM
    ElectraForMaskedLM DebertaForMaskedLM DebertaV2ForMaskedLM ConvBertForMaskedLM MobileBertForMaskedLM
    MPNetForMaskedLM SqueezeBertForMaskedLM BigBirdForMaskedLM LongformerForMaskedLM FNetForMaskedLM
    IBertForMaskedLM MegatronBertForMaskedLM ModernBertForMaskedLM NystromformerForMaskedLM RoFormerForMaskedLM
    RobertaPreLayerNormForMaskedLM YosoForMaskedLM MraForMaskedLM EsmForMaskedLM EuroBertForMaskedLM
    NomicBertForMaskedLM LayoutLMForMaskedLM XLNetLMHeadModel CanineForSequenceClassification
    BertForSequenceClassification BartForConditionalGeneration UMT5ForConditionalGeneration
    MT5ForConditionalGeneration PegasusForConditionalGeneration BlenderbotForConditionalGeneration
    M2M100ForConditionalGeneration NllbMoeForConditionalGeneration ProphetNetForConditionalGeneration
    ViTForImageClassification DeiTForImageClassification BeitForImageClassification Dinov2ForImageClassification
    Dinov2WithRegistersForImageClassification DINOv3ViTModel IJepaForImageClassification SiglipVisionModel
    CLIPVisionModel Aimv2VisionModel PixtralVisionModel InternVLVisionModel SamVisionModel MLCDVisionModel
    ImageGPTForImageClassification SwiftFormerForImageClassification
"""
TRANSFORMERS: dict[str, Tiny] = {
    **{name: Tiny() for name in _TRANSFORMERS.split()},
    "DeepseekV2ForCausalLM": Tiny(_LATENT | _ONE_GROUP | {"head_dim": 16, "first_k_dense_replace": 1}),
    "DeepseekV3ForCausalLM": Tiny(_LATENT | _ONE_GROUP | {"head_dim": 16, "first_k_dense_replace": 1}),
    "Mamba2ForCausalLM": Tiny({"num_heads": 8, "head_dim": 32, "n_groups": 1, "chunk_size": 32}),
    "BambaForCausalLM": Tiny(_MAMBA),
    "FalconH1ForCausalLM": Tiny(_MAMBA | {"mamba_d_ssm": 2 * WIDTH}),
    "GraniteMoeHybridForCausalLM": Tiny(_MAMBA | {"layer_types": ["mamba", "attention"]}),
    "GPTNeoForCausalLM": Tiny({"attention_types": [[["global", "local"], 1]]}),
    "GPTJForCausalLM": Tiny({"rotary_dim": 16}),
    "CodeGenForCausalLM": Tiny({"rotary_dim": 16}),
    "Dots1ForCausalLM": Tiny(_ONE_GROUP | {"n_shared_experts": 1, "first_k_dense_replace": 1}),
    "Gemma3nForCausalLM": Tiny({"num_kv_shared_layers": 0, "vocab_size_per_layer_input": VOCABULARY}),
    "XmodForMaskedLM": Tiny({"default_language": "en_XX"}),
    "FunnelForMaskedLM": Tiny({"block_sizes": [1, 1], "d_inner": 2 * WIDTH, "num_decoder_layers": 1}),
    "RemBertForMaskedLM": Tiny({"input_embedding_size": 64, "output_embedding_size": 64}),
    "XLMWithLMHeadModel": Tiny({"n_words": VOCABULARY}),
    "FlaubertWithLMHeadModel": Tiny({"n_words": VOCABULARY}),
    "LukeForMaskedLM": Tiny({"entity_vocab_size": 16, "entity_emb_size": 32}),
    "PerceiverForMaskedLM": Tiny(
        {"d_latents": WIDTH, "num_latents": 32, "num_self_attends_per_block": 2, "max_position_embeddings": TOKENS}
    ),
    "ReformerModelWithLMHead": Tiny(
        {"is_decoder": True, "axial_pos_shape": [8, 8], "axial_pos_embds_dim": [64, 64], "hash_seed": 0}
    ),
    "MarianMTModel": Tiny(_START),
    "T5ForConditionalGeneration": Tiny(_START),
    "LongT5ForConditionalGeneration": Tiny(_START),
    "SwitchTransformersForConditionalGeneration": Tiny(_START),
    "LEDForConditionalGeneration": Tiny({"attention_window": 16}),
    "SwinForImageClassification": Tiny(_WINDOWS),
    "Swinv2ForImageClassification": Tiny(_WINDOWS),
    "ConvNextForImageClassification": Tiny(_STAGES | {"patch_size": 4}),
    "ConvNextV2ForImageClassification": Tiny(_STAGES | {"patch_size": 4}),
    "ResNetForImageClassification": Tiny(_STAGES | {"embedding_size": 32}),
    "RegNetForImageClassification": Tiny(_STAGES | {"embedding_size": 32, "groups_width": 32}),
    "BitForImageClassification": Tiny(_STAGES | {"embedding_size": 32, "num_groups": 8}),
    "MobileNetV1ForImageClassification": Tiny({"depth_multiplier": 0.5}),
    "MobileNetV2ForImageClassification": Tiny({"depth_multiplier": 0.5}),
    "MobileViTForImageClassification": Tiny({"patch_size": 2}),
    "MobileViTV2ForImageClassification": Tiny({"patch_size": 2, "width_multiplier": 0.5}),
    "PoolFormerForImageClassification": Tiny(_STAGES | {"patch_size": 7}),
    "PvtForImageClassification": Tiny(
        _PYRAMID | {"sequence_reduction_ratios": [2, 1], "strides": [4, 2], "patch_sizes": [4, 2], "mlp_ratios": [4, 4]}
    ),
    "SegformerForSemanticSegmentation": Tiny(
        _PYRAMID
        | {"sr_ratios": [2, 1], "strides": [4, 2], "patch_sizes": [7, 3], "mlp_ratios": [4, 4]}
        | {"decoder_hidden_size": 64}
    ),
    "FocalNetForImageClassification": Tiny(
        {"embed_dim": 64, "hidden_sizes": [64, 128], "depths": [1, 1], "focal_levels": [2, 2], "focal_windows": [3, 3]}
        | {"patch_size": 4}
    ),
    "HieraForImageClassification": Tiny(
        {"image_size": [64, 64], "embed_dim": 64, "depths": [1, 1, 1, 1], "num_heads": [1, 2, 4, 8]}
    ),
    "DPTForDepthEstimation": Tiny(
        {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [32, 32, 64, 64]}
        | {"fusion_hidden_size": 32}
    ),
    "YolosForObjectDetection": Tiny({"image_size": [64, 64], "num_detection_tokens": 10}),
    "ViTMAEForPreTraining": Tiny(
        {"decoder_hidden_size": 64, "decoder_intermediate_size": WIDTH, "decoder_num_hidden_layers": 1}
        | {"decoder_num_attention_heads": 2}
    ),
    "DetrForObjectDetection": Tiny({"num_queries": 20}),
    "ConditionalDetrForObjectDetection": Tiny({"num_queries": 20}),
    "DeformableDetrForObjectDetection": Tiny({"num_queries": 20}),
    "Wav2Vec2Model": Tiny(_SPEECH),
    "HubertModel": Tiny(_SPEECH),
    "WavLMModel": Tiny(_SPEECH),
    "Data2VecAudioModel": Tiny(_SPEECH | {"num_conv_pos_embeddings": 5}),  # layers there, not a width
    "SEWModel": Tiny(_SPEECH | {"squeeze_factor": 2}),
    "Wav2Vec2ConformerModel": Tiny(_SPEECH),
    "WhisperForConditionalGeneration": Tiny(
        {"max_source_positions": 32, "num_mel_bins": 80, "decoder_start_token_id": 1}, (SEQUENCES, 80, 64)
    ),
    "Speech2TextForConditionalGeneration": Tiny({"decoder_start_token_id": 1}, (SEQUENCES, 64, 80)),
    "ASTForAudioClassification": Tiny({"max_length": 64, "num_mel_bins": 64}, (SEQUENCES, 64, 64)),
    "EncodecModel": Tiny({"num_filters": 8, "hidden_size": WIDTH}, (2, 1, 2400)),
    "ParakeetEncoder": Tiny({"num_mel_bins": 80}, (SEQUENCES, 128, 80)),
    "TimesformerModel": Tiny({"num_frames": 4}, (2, 4, 3, 64, 64)),
    "VideoMAEModel": Tiny({"num_frames": 4}, (2, 4, 3, 64, 64)),
    "VivitModel": Tiny({"num_frames": 4, "tubelet_size": [2, 16, 16]}, (2, 4, 3, 64, 64)),
    "PatchTSTForPrediction": Tiny({"context_length": 64, "num_input_channels": 4}, (SEQUENCES, 64, 4)),
    "PatchTSMixerForPrediction": Tiny({"context_length": 64, "num_input_channels": 4}, (SEQUENCES, 64, 4)),
}
"""Classes of transformers, and how each is made tiny."""


def transformers_sample(name: str, tiny: Tiny) -> Sample:
    """Return a tiny model of a class of transformers, and a batch of its kind of input."""
    import transformers

    made = getattr(transformers, name)
    defaults, known = made.config_class(), inspect.signature(made.config_class.__init__).parameters
    # Of what a model has one of for each of its stages, it is told one by one.
    given = {
        size: n for size, n in TINY.items() if size in known and not isinstance(getattr(defaults, size), (list, tuple))
    }
    model = made(made.config_class(**(given | tiny.sizes))).train()
    inputs = {model.main_input_name: _input(model, tiny.shape)}
    if "labels" in inspect.signature(model.forward).parameters:
        if name.endswith(("SequenceClassification", "ImageClassification")):
            inputs["labels"] = torch.arange(len(inputs[model.main_input_name])) % model.config.num_labels
        elif "vocab_size" in vars(model.config) or model.main_input_name == "input_ids":
            inputs["labels"] = _tokens()
    weights = torch.Generator().manual_seed(0)

    def loss(output: Any) -> Tensor:
        if getattr(output, "loss", None) is not None:
            return output.loss
        first = next(leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad)
        # Random factors: what a norm returns has the same mean and the same mean square whatever it is given.
        return (first * torch.randn(first.shape, generator=weights.manual_seed(0))).mean()

    return Sample(model, (), inputs, loss)


def _tokens() -> Tensor:
    return torch.randint(3, VOCABULARY, (SEQUENCES, TOKENS))


def _input(model: Any, shape: tuple[int, ...] | None) -> Tensor:
    if shape is not None:
        return torch.randn(shape)
    if model.main_input_name in ("input_ids", "inputs"):
        return _tokens()
    if model.main_input_name == "input_values":
        return torch.randn(TINY_IMAGES, 4000)
    return torch.randn(TINY_IMAGES, 3, 64, 64)
