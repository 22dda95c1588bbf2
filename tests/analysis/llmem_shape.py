"""What LLMem's closed forms need to know about a decoder, and how to read it off the modules.

Structure and shapes decide, not the names of classes: layers are the heaviest stack, a product is whatever owns a matrix.

Source: LLMem, sections 4.1 and 4.2 (table 1 for the symbols).
"""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass

from torch import nn

from graphopt.errors import InputError

HALF_BYTES, SINGLE_BYTES = 2, 4  # B_16 and B_32, per number


@dataclass(frozen=True)
class ModelShape:
    """What the closed forms need to know about a decoder; sizes of parameters are in elements.

    Attributes:
        layers: l_n, checkpointed layers.
        hidden_size: o_n, output features of a layer.
        embeddings: e_n, embedding tables outside the layers.
        embedding_size: output features of the token embedding.
        vocabulary: dict_n.
        embedding_elements: embed_p, embedding tables too large for a chunk.
        other_elements: other_p, everything else but the head.
        head_elements: weight and bias of the head; lm_p is its fp16 size, tied or not.
        tied_head: whether the head's weight is an embedding table, which is then in `embedding_elements` or `other_elements`.
        weight_elements: t_p of every embedding and matrix product, each once, without the head.
        bias_elements: the same for their biases.
        loaded_bytes: fp16 copy of the model that stays on the devices after it was loaded; 0 if it is released.
        logits_bytes: B, bytes per logit: 4 where the model casts logits to fp32, else 2.
        chunk_elements: cs, or None for parameters that are not kept in chunks.
    """

    layers: int
    hidden_size: int
    embeddings: int
    embedding_size: int
    vocabulary: int
    embedding_elements: int
    other_elements: int
    head_elements: int
    tied_head: bool
    weight_elements: tuple[int, ...]
    bias_elements: tuple[int, ...]
    loaded_bytes: int = 0
    logits_bytes: int = HALF_BYTES
    chunk_elements: int | None = None

    @property
    def chunked_elements(self) -> int:
        """`other_elements` filled up to whole chunks."""
        chunk = self.chunk_elements or 1
        return divide_up(self.other_elements, chunk) * chunk


def divide_up(amount: int, parts: int) -> int:
    """The quotient rounded up."""
    return -(-amount // parts)


def read_shape(model: nn.Module, *, logits_bytes: int = HALF_BYTES, chunk_elements: int | None = None) -> ModelShape:
    """Read a decoder's shape off its modules; nothing runs, so the model may be on the meta device.

    The layers are the stack with the most parameters; their hidden size is the one that their matrices share; the head is the
    last module outside them whose weight has a row for each row of an embedding. Every parameter is taken to be trained.

    Args:
        model: a language model with its head.
        logits_bytes: 4 if the model casts its logits to fp32, which its modules do not tell.
        chunk_elements: chunk size of the parameters, None for no chunks.
    Raises:
        InputError: no stack of layers, no embedding, or no head.
    """
    name = type(model).__name__
    stack = _layer_stack(model)
    if stack is None:
        raise InputError(f"{name} has no nn.ModuleList or uniform nn.Sequential of layers: fill in a ModelShape by hand.")
    inside = set(stack.modules())
    outside = [module for module in model.modules() if module not in inside]
    embeddings = [module for module in outside if isinstance(module, nn.Embedding)]
    rows = {table.num_embeddings for table in embeddings}
    heads = [module for module in outside if module not in embeddings and _rows(module) in rows]
    if not heads:
        raise InputError(f"{name} has no head over the rows of an embedding: pass the model with its language modeling head.")
    head = heads[-1]
    vocabulary = _rows(head)
    embedding_size = next(table.embedding_dim for table in embeddings if table.num_embeddings == vocabulary)

    sizes = [p.numel() for p in model.parameters()]
    total = sum(sizes)
    chunk_limit = statistics.fmean(sizes) + 3 * statistics.pstdev(sizes)  # Gemini's filter of parameters too large for chunks
    tables = {id(table.weight): table.weight.numel() for table in embeddings}
    head_elements = sum(p.numel() for p in head.parameters())
    tied = id(head.weight) in tables
    embedded = sum(size for size in tables.values() if size > chunk_limit)
    weights, biases = _products(model, head)
    return ModelShape(
        layers=len(stack),
        hidden_size=_shared_size(stack, embedding_size),
        embeddings=len(embeddings),
        embedding_size=embedding_size,
        vocabulary=vocabulary,
        embedding_elements=embedded,
        other_elements=total - embedded - (0 if tied else head_elements),
        head_elements=head_elements,
        tied_head=tied,
        weight_elements=weights,
        bias_elements=biases,
        loaded_bytes=HALF_BYTES * total,
        logits_bytes=logits_bytes,
        chunk_elements=chunk_elements,
    )


def _layer_stack(model: nn.Module) -> nn.ModuleList | nn.Sequential | None:
    """The list of modules with the most parameters, the outermost of equals."""
    stacks = [m for m in model.modules() if isinstance(m, (nn.ModuleList, nn.Sequential)) and m is not model]
    uniform = [m for m in stacks if isinstance(m, nn.ModuleList) or len({type(child) for child in m}) == 1]
    return max(uniform, key=lambda m: sum(p.numel() for p in m.parameters()), default=None)


def _rows(module: nn.Module) -> int:
    """Rows of the module's own weight matrix, 0 if it has none."""
    weight = module._parameters.get("weight")
    return 0 if weight is None or weight.dim() != 2 else weight.shape[0]


def _shared_size(stack: nn.Module, embedding_size: int) -> int:
    """The dimension that most matrices of `stack` have; of equals, the embedding's."""
    count: Counter[int] = Counter()
    for parameter in stack.parameters():
        if parameter.dim() >= 2:
            count.update(set(parameter.shape))
    return max(count, key=lambda size: (count[size], size == embedding_size, -size), default=embedding_size)


def _products(model: nn.Module, head: nn.Module) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Elements of each weight and each bias of the modules that own a matrix, tied weights once, without the head."""
    seen: dict[int, nn.Parameter] = {}
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if module is not head and any(p.dim() >= 2 for p in own):
            seen |= {id(p): p for p in own}
    weights = tuple(p.numel() for p in seen.values() if p.dim() >= 2)
    return weights, tuple(p.numel() for p in seen.values() if p.dim() < 2)
