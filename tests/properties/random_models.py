"""Small random networks: `networks()` draws a model in float64, which makes inputs for any batch size (`Network.inputs`)."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from tests.properties.random_layers import Choices, Shape, layers

VOCABULARY, CLASSES = 7, 3


class Network(nn.Module):
    """Stem, layers, head and loss.

    Attributes:
        shape: of the input x, without the batch.
        objective: how the outputs of the head are compared with y.
        cap, shifted, cross_entropy: how logits are bounded, whether each token predicts the next one's label, and what the
            cross entropy is made with.
        output: what is returned; `loss_of` finds what is differentiated.
        input_gradient, strided, changed: whether x requires a gradient, its batch is the last dimension in memory, and it is
            changed in place.
        sizes: of the batches that it is to be tried with; the first is the example.
    """

    def __init__(self, c: Choices) -> None:
        super().__init__()
        self.kind = c.of(["rows", "sequence", "image", "tokens"])
        time = c.size(1, 5)
        self.shape: Shape = {"rows": (c.size(),), "sequence": (time, c.size()), "tokens": (time,)}.get(
            self.kind, (c.size(1, 3), c.size(1, 6), c.size(1, 6))
        )
        shape = self.shape
        if self.kind == "tokens":
            shape = (time, c.size(2, 6))
            self.embedding = nn.Embedding(VOCABULARY, shape[1], padding_idx=c.of([None, 0]))
        self.body = layers(c, shape, 2, least=2, most=5)
        if len(self.body.out) == 2 and self.kind == "tokens" and c.flag():  # a prediction for every token
            self.head = nn.Linear(self.body.out[1], VOCABULARY, bias=c.flag())
            if self.body.out[1] == shape[1] and c.flag():
                self.head.weight = self.embedding.weight
        else:
            self.head = nn.Linear(math.prod(self.body.out), CLASSES)
        self.per_token = self.head.out_features == VOCABULARY and self.head.in_features == self.body.out[-1]
        self.per_token = self.per_token and len(self.body.out) == 2 and self.kind == "tokens"
        self.objective = c.of(["cross entropy", "mse", "sum", "cross entropy"])
        self.cap = c.of([None, None, 2.0])
        self.shifted = self.per_token and self.body.out[0] > 1 and c.flag()
        self.cross_entropy: dict[str, Any] = {"reduction": c.of(["mean", "sum", "none"])}
        self.cross_entropy["label_smoothing"] = c.of([0.0, 0.0, 0.2])
        if c.rarely(3):
            self.class_weight = nn.Buffer(0.5 + torch.rand(self.head.out_features))
        self.output = c.of(["loss", "tuple", "dict", "nested", "aliases", "loss", "dict", "tuple", "nested", "two losses"])
        self.input_gradient = self.kind != "tokens" and c.rarely(6)
        self.strided = c.rarely(6)
        self.changed = self.kind != "tokens" and not self.input_gradient and c.rarely(10)
        least = 2 if any(isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d) for m in self.modules()) else 1  # has no variance of one
        self.sizes = tuple(max(least, c.of([4, 2, 3, 5, 6, 2, 3, 4, 5, 6, 4, 1])) for _ in range(2))
        if c.rarely(4):
            self.unused = nn.Linear(2, 2)
        parameters = list(self.parameters())
        frozen = [c.rarely(5) for _ in parameters]
        for p, freeze in zip(parameters[:-1], frozen, strict=False):
            p.requires_grad_(p.requires_grad and not freeze)

    def extra_repr(self) -> str:
        frozen = [name for name, p in self.named_parameters() if not p.requires_grad]
        inputs = f"{self.kind} {self.shape}, input_gradient={self.input_gradient}, strided={self.strided}, changed={self.changed}"
        head = f"{self.objective} {self.cross_entropy}, cap={self.cap}, shifted={self.shifted}"
        return f"{inputs}, batches {self.sizes}, {head}, returns {self.output}; frozen {frozen}"

    def forward(self, x: Tensor, y: Tensor) -> Any:
        if self.changed:
            x.mul_(0.5)
        hidden = self.body(self.embedding(x) if self.kind == "tokens" else x)
        logits = self.head(hidden if self.per_token else hidden.flatten(1))
        if self.cap is not None:
            logits = self.cap * torch.tanh(logits / self.cap)
        if self.objective == "cross entropy":
            scores, labels = (logits[:, :-1], y[:, 1:]) if self.shifted else (logits, y)
            weight = getattr(self, "class_weight", None)
            terms = F.cross_entropy(scores.flatten(0, -2), labels.flatten(), weight=weight, ignore_index=-1, **self.cross_entropy)
            loss = terms.mean()
        elif self.objective == "mse":
            loss = F.mse_loss(logits, F.one_hot(y.clamp(min=0), logits.shape[-1]).to(logits))
        else:
            loss = (logits.logsumexp(-1) * (y + 1)).sum()
        outputs: dict[str, Any] = {
            "loss": loss,
            "tuple": (loss, logits),
            "dict": {"logits": logits, "loss": loss},
            "nested": {"loss": loss, "other": [(logits.detach().argmax(-1), None), {"number": 3}]},
            "aliases": (loss, x, logits, logits.flatten(1), self.head.weight),
            "two losses": (loss, logits),
        }
        return outputs[self.output]

    def loss_of(self, outputs: Any) -> Tensor:
        """The scalar to differentiate."""
        if self.output == "two losses":
            return outputs[0] + outputs[1].square().mean()
        return outputs["loss"] if isinstance(outputs, dict) else outputs[0] if isinstance(outputs, tuple) else outputs

    def inputs(self, batch: int, seed: int) -> tuple[Tensor, Tensor]:
        """(x, y) for a batch."""
        generator = torch.Generator().manual_seed(seed)
        places, classes = ((batch, *self.shape), VOCABULARY) if self.per_token else ((batch,), CLASSES)
        y = torch.randint(classes, places, generator=generator)
        if self.per_token and batch * self.shape[0] > 1:
            y.view(-1)[1::3] = -1  # ignored
        x = torch.randn(batch, *self.shape, generator=generator, dtype=torch.float64)
        if self.kind == "tokens":
            x = torch.randint(VOCABULARY, (batch, *self.shape), generator=generator)
        if self.strided:
            x = x.movedim(0, -1).contiguous().movedim(-1, 0)
        return x.requires_grad_(self.input_gradient), y


@st.composite
def networks(draw: Any) -> Network:
    """A model in float64, the same for the same choices."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Network(Choices(draw)).double()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.1 * torch.randn(p.shape, dtype=torch.float64))
    return model
