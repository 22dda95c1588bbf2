"""Methods of PEFT and quantised layers for `graphopt bench breadth`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from graphopt.bench.breadth_run import BUDGET, Case, Made
from graphopt.bench.breadth_transformers import DECODERS, ENCODERS, SEQUENCES

GROUP = "PEFT and quantised layers"

BASES = {"bert": ENCODERS["bert"], "llama": DECODERS["llama"], "gpt2": DECODERS["gpt2"], "t5": SEQUENCES["t5"]}

TARGETS = {
    "bert": ["query", "value", "intermediate.dense"],
    "llama": ["q_proj", "v_proj", "down_proj"],
    "gpt2": ["c_attn"],
    "t5": ["q", "v"],
}
"""Layers of each base that get adapters."""

TASKS = {"bert": "SEQ_CLS", "llama": "CAUSAL_LM", "gpt2": "CAUSAL_LM", "t5": "SEQ_2_SEQ_LM"}


def not_zero(model: nn.Module) -> None:
    """Give adapters that start at zero other values, so that every tensor has a gradient."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and not parameter.any():
                parameter.normal_(0, 0.05)


def adapted(base: str, config: str, targets: bool = True, **options: Any) -> Callable[[], Made]:
    """A base with the adapters of one of PEFT's configurations."""

    def make() -> Made:
        import peft

        model, batch = BASES[base].make()
        given = {"target_modules": TARGETS[base], **options} if targets else options
        made = peft.get_peft_model(model, getattr(peft, config)(task_type=TASKS[base], **given))
        not_zero(made)
        return made, batch

    return make


class Quantised(nn.Module):
    """Frozen quantised layers with small trainable ones beside them, as QLoRA has them."""

    def __init__(self, layer: Callable[[int, int], nn.Module], width: int = 64) -> None:
        super().__init__()
        self.frozen = nn.ModuleList(layer(width, width) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(width, 4, bias=False) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(4, width, bias=False) for _ in range(3))
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """The loss."""
        for frozen, down, up in zip(self.frozen, self.down, self.up, strict=True):
            x = torch.tanh(frozen(x) + up(down(x))) + x
        return nn.functional.cross_entropy(self.head(x), labels)


def quantised(kind: str, **options: Any) -> Callable[[], Made]:
    """A network with layers of bitsandbytes."""

    def make() -> Made:
        import bitsandbytes

        def layer(inner: int, outer: int) -> nn.Module:
            plain = nn.Linear(inner, outer)
            made = getattr(bitsandbytes.nn, kind)(inner, outer, **options)
            made.load_state_dict(plain.state_dict())
            return made.to("cpu").requires_grad_(False)

        return Quantised(layer), {"x": torch.randn(16, 64), "labels": torch.randint(0, 5, (16,))}

    return make


def quantised_llama(**options: Any) -> Callable[[], Made]:
    """LoRA on a Llama whose layers are held in 4 or 8 bits."""

    def make() -> Made:
        import bitsandbytes
        import peft

        model, batch = BASES["llama"].make()
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear) and name != "lm_head":
                    made = bitsandbytes.nn.Linear4bit(child.in_features, child.out_features, bias=False, **options)
                    made.load_state_dict(child.state_dict())
                    setattr(module, name, made.to("cpu"))
        adapters = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=TARGETS["llama"])
        adapted_model = peft.get_peft_model(model, adapters)
        not_zero(adapted_model)
        return adapted_model, batch

    return make


LYCORIS: dict[str, Any] = {"r": 4, "alpha": 8}

BELOW = ("trainable-tokens", "prefix-tuning", "prefix-tuning-bert", "prompt-tuning", "p-tuning")
"""Methods that train only what comes before the first layer: every step is as expensive as any other."""

ADAPTERS: dict[str, Case] = {
    name: Case(make, GROUP, budget=1.0 if name in BELOW else BUDGET)
    for name, make in {
        "lora-bert": adapted("bert", "LoraConfig", r=4),
        "lora-llama": adapted("llama", "LoraConfig", r=4),
        "lora-gpt2": adapted("gpt2", "LoraConfig", r=4, fan_in_fan_out=True),
        "lora-t5": adapted("t5", "LoraConfig", r=4),
        "lora-all-linear": adapted("llama", "LoraConfig", r=4, target_modules="all-linear"),
        "lora-bias": adapted("bert", "LoraConfig", r=4, bias="all"),
        "lora-embeddings": adapted("llama", "LoraConfig", r=4, target_modules=["embed_tokens", "q_proj", "v_proj"]),
        "lora-saved-modules": adapted("llama", "LoraConfig", r=4, modules_to_save=["lm_head"]),
        "rs-lora": adapted("llama", "LoraConfig", r=4, use_rslora=True),
        "dora": adapted("bert", "LoraConfig", r=4, use_dora=True),
        "adalora": adapted("bert", "AdaLoraConfig", init_r=4, target_r=2, total_step=100),
        "loha": adapted("bert", "LoHaConfig", **LYCORIS),
        "lokr": adapted("bert", "LoKrConfig", **LYCORIS),
        "ia3": adapted("llama", "IA3Config", target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
        "vera": adapted("llama", "VeraConfig", r=8, target_modules=["q_proj", "o_proj"]),
        "oft": adapted("bert", "OFTConfig", oft_block_size=8),
        "boft": adapted("bert", "BOFTConfig", boft_block_size=4),
        "hra": adapted("bert", "HRAConfig", r=4),
        "fourier": adapted("bert", "FourierFTConfig", n_frequency=20),
        "miss": adapted("llama", "MissConfig", r=4),
        "rand-lora": adapted("llama", "RandLoraConfig", r=4, target_modules=["q_proj", "o_proj"]),
        "vb-lora": adapted("llama", "VBLoRAConfig", r=4, num_vectors=8, vector_length=8, target_modules=["q_proj"]),
        "road": adapted("llama", "RoadConfig", group_size=8),
        "shira": adapted("llama", "ShiraConfig", r=4),
        "c3a": adapted("bert", "C3AConfig", block_size=8),
        "wave-ft": adapted("bert", "WaveFTConfig", n_frequency=20),
        "layer-norms": adapted("llama", "LNTuningConfig", target_modules=["input_layernorm", "post_attention_layernorm"]),
        "trainable-tokens": adapted("llama", "TrainableTokensConfig", targets=False, token_indices=[5, 6, 7, 8]),
        "prefix-tuning": adapted("llama", "PrefixTuningConfig", targets=False, num_virtual_tokens=4),
        "prefix-tuning-bert": adapted("bert", "PrefixTuningConfig", targets=False, num_virtual_tokens=4, prefix_projection=True),
        "prompt-tuning": adapted("llama", "PromptTuningConfig", targets=False, num_virtual_tokens=4),
        "p-tuning": adapted("bert", "PromptEncoderConfig", targets=False, num_virtual_tokens=4, encoder_hidden_size=16),
        "adaption-prompt": adapted("llama", "AdaptionPromptConfig", targets=False, adapter_len=4, adapter_layers=2),
        "linear-4bit": quantised("Linear4bit", quant_type="nf4", compute_dtype=torch.float32),
        "linear-fp4": quantised("LinearFP4", compute_dtype=torch.float32),
        "linear-8bit": quantised("Linear8bitLt", has_fp16_weights=False),
        "qlora-llama": quantised_llama(quant_type="nf4", compute_dtype=torch.float32),
    }.items()
}
