"""Tiny models of timm and diffusers for `graphopt bench breadth`."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from graphopt.bench.breadth_run import Case, Made
from graphopt.bench.step_models import Classified

SIZE = 32


class Regressed(nn.Module):
    """A network of diffusers with its loss."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, target: Tensor, **inputs: Any) -> Tensor:
        """The squared distance of its sample from a target."""
        return nn.functional.mse_loss(self.network(**inputs).sample, target)


class _Anything(type):
    """A class with every attribute."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _stand_in(name)


def _stand_in(name: str) -> type:
    return _Anything(name, (), {})


class _Empty(types.ModuleType):
    """A module in which every name is a class that does nothing."""

    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _stand_in(name)


class _Finder:
    """Finds `torchvision` and everything in it."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """As of `importlib.abc.MetaPathFinder`."""
        if name.split(".")[0] != "torchvision":
            return None
        return importlib.machinery.ModuleSpec(name, _Finder, is_package=True)  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """As of `importlib.abc.Loader`."""
        return _Empty(spec.name)

    @staticmethod
    def exec_module(module: types.ModuleType) -> None:
        """As of `importlib.abc.Loader`."""


def import_timm() -> Any:
    """timm, which needs torchvision for its data sets and transforms alone: where there is none, with an empty one."""
    if importlib.util.find_spec("torchvision") is None:
        sys.meta_path.append(_Finder)
    import timm

    return timm


def pictures(name: str, size: int = SIZE, **options: Any) -> Callable[[], Made]:
    """A model of timm with a batch of pictures."""

    def make() -> Made:
        model = import_timm().create_model(name, num_classes=5, **options)
        return Classified(model), {"x": torch.randn(4, 3, size, size), "labels": torch.randint(0, 5, (4,))}

    return make


def sampled(name: str, target: tuple[int, ...], inputs: Callable[[], dict[str, Any]], **options: Any) -> Callable[[], Made]:
    """A model of diffusers with a batch.

    Args:
        target: the shape of its output.
    """

    def make() -> Made:
        import diffusers

        model = getattr(diffusers, name)(**options)
        with torch.no_grad():
            for parameter in model.parameters():
                if not parameter.any():  # a gate that starts at zero would hide most gradients
                    parameter.normal_(0, 0.05)
        return Regressed(model), {"target": torch.randn(*target), **inputs()}

    return make


def _noisy(channels: int = 3, size: int = 16) -> dict[str, Any]:
    return {"sample": torch.randn(2, channels, size, size), "timestep": torch.tensor([3, 7])}


def _captioned(channels: int = 4, size: int = 16, width: int = 32) -> dict[str, Any]:
    return {**_noisy(channels, size), "encoder_hidden_states": torch.randn(2, 6, width)}


def _hidden(channels: int = 4, size: int = 8) -> dict[str, Any]:
    return {"hidden_states": torch.randn(2, channels, size, size), "timestep": torch.tensor([3, 7])}


def _flux() -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(2, 16, 4), "encoder_hidden_states": torch.randn(2, 6, 32),
        "pooled_projections": torch.randn(2, 32),
        "timestep": torch.tensor([0.3, 0.7]), "img_ids": torch.randint(0, 4, (16, 3)).float(), "txt_ids": torch.zeros(6, 3),
    }  # fmt: skip


TIMM: dict[str, Callable[[], Made]] = {
    "timm-vit": pictures("vit_tiny_patch16_224", img_size=SIZE, patch_size=8, embed_dim=32, depth=2, num_heads=4),
    "timm-vit-relative": pictures(
        "vit_relpos_small_patch16_224", img_size=SIZE, patch_size=8, embed_dim=32, depth=2, num_heads=4
    ),
    "timm-eva": pictures("eva02_tiny_patch14_224", img_size=SIZE, patch_size=8, embed_dim=32, depth=2, num_heads=4),
    "timm-cait": pictures("cait_xxs24_224", img_size=SIZE, patch_size=8, embed_dim=32, depth=2, num_heads=4),
    "timm-xcit": pictures("xcit_nano_12_p16_224", img_size=SIZE, patch_size=8, embed_dim=32, depth=2, num_heads=4),
    "timm-swin": pictures(
        "swin_tiny_patch4_window7_224", img_size=SIZE, embed_dim=16, depths=(2, 1), num_heads=(2, 4), window_size=4
    ),
    "timm-gmlp": pictures("gmlp_ti16_224", img_size=SIZE),
    "timm-convnext": pictures("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 16, 16, 32)),
    "timm-resnet": pictures("resnet10t"),
    "timm-resnetv2": pictures("resnetv2_50", layers=(1, 1, 1, 1), channels=(8, 16, 16, 32), stem_chs=8),
    "timm-mobilenetv3": pictures("mobilenetv3_small_050"),
    "timm-efficientnet": pictures("efficientnet_lite0"),
    "timm-ghostnet": pictures("ghostnet_050"),
    "timm-densenet": pictures("densenet121", growth_rate=8, block_config=(2, 2, 2, 2)),
    "timm-regnet": pictures("regnetx_002"),
    "timm-edgenext": pictures("edgenext_xx_small", size=64),
    "timm-starnet": pictures("starnet_s050"),
    "timm-fastvit": pictures("fastvit_t8", layers=(1, 1, 1, 1), embed_dims=(16, 16, 32, 32)),
}

DIFFUSERS: dict[str, Callable[[], Made]] = {
    "unet": sampled(
        "UNet2DModel", (2, 3, 16, 16), _noisy, sample_size=16, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=8,
    ),
    "unet-text": sampled(
        "UNet2DConditionModel", (2, 4, 16, 16), _captioned, sample_size=16, block_out_channels=(8, 16), layers_per_block=1,
        norm_num_groups=4, cross_attention_dim=32, attention_head_dim=4, in_channels=4, out_channels=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ),
    "vae": sampled(
        "AutoencoderKL", (2, 3, 16, 16), lambda: {"sample": torch.randn(2, 3, 16, 16)}, block_out_channels=(8, 16),
        norm_num_groups=4,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, sample_size=16,
    ),
    "vae-sampled": sampled(
        "AutoencoderKL", (2, 3, 16, 16), lambda: {"sample": torch.randn(2, 3, 16, 16), "sample_posterior": True},
        block_out_channels=(8, 16), norm_num_groups=4, down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, sample_size=16,
    ),
    "vae-tiny": sampled(
        "AutoencoderTiny", (2, 3, 16, 16), lambda: {"sample": torch.rand(2, 3, 16, 16)}, encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8), num_encoder_blocks=(1, 1), num_decoder_blocks=(1, 1),
    ),
    "vq": sampled(
        "VQModel", (2, 3, 16, 16), lambda: {"sample": torch.randn(2, 3, 16, 16)}, block_out_channels=(8, 16), norm_num_groups=4,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, num_vq_embeddings=16,
    ),
    "flux": sampled(
        "FluxTransformer2DModel", (2, 16, 4), _flux, patch_size=1, in_channels=4, num_layers=1, num_single_layers=1,
        attention_head_dim=16, num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
    ),
    "sd3": sampled(
        "SD3Transformer2DModel", (2, 4, 8, 8),
        lambda: {**_hidden(), "encoder_hidden_states": torch.randn(2, 6, 32), "pooled_projections": torch.randn(2, 32)},
        sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=32, pooled_projection_dim=32, out_channels=4, pos_embed_max_size=8,
    ),
    "dit": sampled(
        "DiTTransformer2DModel", (2, 8, 8, 8), lambda: {**_hidden(), "class_labels": torch.tensor([1, 2])}, num_attention_heads=4,
        attention_head_dim=8, in_channels=4, out_channels=8, num_layers=2, sample_size=8, patch_size=2, num_embeds_ada_norm=10,
    ),
    "pixart": sampled(
        "PixArtTransformer2DModel", (2, 8, 8, 8),
        lambda: {
            **_hidden(), "encoder_hidden_states": torch.randn(2, 6, 32),
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        },
        num_attention_heads=4, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=2, sample_size=8, patch_size=2,
        cross_attention_dim=32, caption_channels=32, use_additional_conditions=False,
    ),
    "sana": sampled(
        "SanaTransformer2DModel", (2, 4, 8, 8), lambda: {**_hidden(), "encoder_hidden_states": torch.randn(2, 6, 32)},
        in_channels=4,
        out_channels=4, num_attention_heads=4, attention_head_dim=8, num_layers=2, num_cross_attention_heads=4,
        cross_attention_head_dim=8, cross_attention_dim=32, caption_channels=32, sample_size=8, patch_size=1,
    ),
    "wan": sampled(
        "WanTransformer3DModel", (2, 4, 2, 8, 8),
        lambda: {
            "hidden_states": torch.randn(2, 4, 2, 8, 8), "timestep": torch.tensor([3, 7]),
            "encoder_hidden_states": torch.randn(2, 6, 32),
        },
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, text_dim=32, freq_dim=16, ffn_dim=64,
        num_layers=2,
    ),
    "cogvideo": sampled(
        "CogVideoXTransformer3DModel", (2, 2, 4, 8, 8),
        lambda: {
            "hidden_states": torch.randn(2, 2, 4, 8, 8), "timestep": torch.tensor([3, 7]),
            "encoder_hidden_states": torch.randn(2, 6, 32),
        },
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, time_embed_dim=8, text_embed_dim=32,
        num_layers=2,
        sample_width=8, sample_height=8, sample_frames=5, patch_size=2, max_text_seq_length=6,
    ),
}  # fmt: skip

OTHERS: dict[str, Case] = {
    **{name: Case(make, "timm") for name, make in TIMM.items()},
    **{name: Case(make, "diffusers") for name, make in DIFFUSERS.items()},
}
