"""Logits in chunks of tokens: found by structure, exact, and smaller."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from graphopt.passes import LinearCrossEntropy, Vcas, run_pass
from graphopt.passes.linear_cross_entropy.heads import find_heads
from graphopt.passes.linear_cross_entropy.technique import prepared
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import graphopt
from graphopt import PassError
from graphopt.analysis.step_memory import step_memory
from graphopt.capture import capture
from graphopt.graph import TrainingGraph
from graphopt.ops.by_tokens import Program, by_tokens
from graphopt.testing import PassCheck, check_pass
from tests.long_forms import long

BOTH = (torch.float64, torch.float32)


class LanguageModel(nn.Module):
    """An embedding, a layer and a head; `form` says how the loss is computed from logits."""

    def __init__(self, form: str = "mean", vocabulary: int = 40, bias: bool = True, tied: bool = False) -> None:
        super().__init__()
        self.form = form
        self.embed, self.layer = nn.Embedding(vocabulary, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, vocabulary, bias=bias)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        hidden = torch.tanh(self.layer(self.embed(ids)))
        logits = self.head(hidden)
        if self.form == "soft capped":
            logits = 5 * torch.tanh(logits / 5)
        if self.form == "scaled":
            logits = logits * 0.3
        if "shifted" in self.form:
            logits, labels = logits[:, :-1], labels[:, 1:]
        weight = torch.linspace(0.5, 2, logits.shape[-1], dtype=logits.dtype) if "weighted" in self.form else None
        reduction = next((r for r in ("sum", "none") if r in self.form), "mean")
        smoothing = 0.1 if "smoothed" in self.form else 0.0
        labels = labels.flatten()
        if self.form == "log softmax":
            return F.nll_loss(F.log_softmax(logits, -1).flatten(0, 1), labels)
        loss = F.cross_entropy(logits.flatten(0, 1), labels, weight=weight, reduction=reduction, label_smoothing=smoothing)
        if reduction == "none":
            loss = (loss * torch.linspace(0, 1, len(labels), dtype=loss.dtype)).sum() / 7
        return (loss, logits) if "returned" in self.form else loss


def batch(samples: int = 3, tokens: int = 10, vocabulary: int = 40, ignored: int = 4) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(0, vocabulary, (samples, tokens))
    labels = ids.clone()
    labels[:, :ignored] = -100
    return ids, labels


def heads(graph: TrainingGraph) -> list[str]:
    return [site.name for site in LinearCrossEntropy().applicable(graph)]


def checked(model: nn.Module, inputs: Any, chunks: int = 3, dtypes: Sequence[torch.dtype] = BOTH) -> PassCheck:
    """The pass held to its contract, on graphs of this batch alone."""

    def cast(value: Any, dtype: torch.dtype) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    args, kwargs = (inputs, {}) if isinstance(inputs, tuple) else ((), inputs)
    graphs = {
        dtype: capture(
            copy.deepcopy(model).to(dtype),
            tuple(cast(a, dtype) for a in args),
            {k: cast(v, dtype) for k, v in kwargs.items()},
            symbolic=False,
        )
        for dtype in dtypes
    }
    return check_pass(LinearCrossEntropy(chunks), model, inputs, heads, captured=graphs, dtypes=dtypes)[-1]


FORMS = [
    "mean", "sum", "weighted", "soft capped", "scaled", "shifted", "returned", "smoothed", "weighted smoothed sum",
    "weighted none", "smoothed none", "shifted returned", "log softmax",
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_exact_and_takes_the_same_flops(form: str) -> None:
    dtypes = BOTH if form in ("mean", "weighted smoothed sum") else (torch.float64,)  # others would round the same in float32
    report = checked(LanguageModel(form), batch(), dtypes=dtypes).report
    assert report.changes.changed == ("head.weight",)
    if "shifted" in form:  # the last of ten steps has no label; its logits are computed where they are returned
        assert report.step_flops_after == report.step_flops_before - (2 if form == "shifted returned" else 3) * 3 * 2 * 8 * 40
    else:
        assert report.step_flops_after == report.step_flops_before


@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_frozen_heads(tied: bool) -> None:
    model = LanguageModel(bias=False, tied=tied)
    assert checked(model, batch()).report.changes.changed == ("embed.weight" if tied else "head.weight",)
    if not tied:
        model.head.weight.requires_grad_(False)
        assert checked(model, batch()).report.changes.changed == ("head.weight",)


@given(
    samples=st.integers(1, 3), tokens=st.integers(2, 9), vocabulary=st.integers(9, 30), chunks=st.integers(1, 12),
    ignored=st.integers(0, 9),
)  # fmt: skip
@settings(max_examples=12)
def test_any_size_and_any_number_of_chunks(samples: int, tokens: int, vocabulary: int, chunks: int, ignored: int) -> None:
    inputs = batch(samples, tokens, vocabulary, min(ignored, tokens - 1))
    checked(LanguageModel(vocabulary=vocabulary), inputs, chunks, (torch.float64,))


@given(
    form=st.sampled_from(["smoothed", "weighted smoothed sum", "weighted none", "shifted weighted", "shifted smoothed"]),
    samples=st.integers(1, 3), tokens=st.integers(2, 9), chunks=st.integers(1, 12), ignored=st.integers(0, 9),
)  # fmt: skip
@settings(max_examples=8)
def test_any_loss(form: str, samples: int, tokens: int, chunks: int, ignored: int) -> None:
    inputs = batch(samples, tokens, 13, min(ignored, tokens - 2 if "shifted" in form else tokens - 1))
    checked(LanguageModel(form, vocabulary=13), inputs, chunks, (torch.float64,))


@pytest.mark.parametrize("form", ["mean", "smoothed", "shifted"])
def test_any_number_of_tokens_by_one_graph(form: str) -> None:
    """Dynamo makes sizes symbols at the second batch size and length."""
    torch.manual_seed(0)
    model = LanguageModel(form).double()
    eager = copy.deepcopy(model)
    opt = graphopt.optimize(model, batch(), passes=[LinearCrossEntropy(3)], backend="aot_eager")
    for samples, tokens, ignored in ((3, 10, 4), (5, 7, 0), (4, 12, 11), (2, 3, 1), (6, 5, 5)):
        inputs = batch(samples, tokens, ignored=ignored)
        for run in (opt, eager):
            run.zero_grad()
            loss = run(*inputs)
            loss.backward()
        for parameter, other in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-10, atol=1e-12)
        assert opt.last_step is not None
        assert opt.last_step.reports[0].changes.changed == ("head.weight",)
    assert opt.counters.compilations == 2
    assert not opt.report.notes


def test_ignored_tokens_cost_nothing() -> None:
    """Counted while the operator itself runs: 3 x 4 of 3 x 10 tokens have no label."""
    graph = capture(LanguageModel(), batch(), symbolic=False)
    rewritten, _ = run_pass(LinearCrossEntropy(4), graph, ["head.weight"])
    (node,) = rewritten.graph.find_nodes(op="call_function", target=torch.ops.graphopt.by_tokens.default)
    program, rows, whole, chunk, flops, workspace = node.args
    values = [[torch.randn(n.meta["val"].shape) for n in nodes] for nodes in (rows, whole)]
    labels = Program.of(program).labels
    for ignored, tokens in ((0, 30), (4, 18), (10, 0)):
        values[0][labels] = batch(ignored=ignored)[1].flatten()
        with FlopCounterMode(display=False) as counter:
            by_tokens(program, *values, chunk, flops, workspace)
        assert counter.get_total_flops() == flops * tokens


def test_where_every_label_is_ignored_the_loss_is_no_number_and_gradients_are_zero() -> None:
    model, (ids, labels) = LanguageModel(), batch(ignored=10)
    opt = graphopt.optimize(copy.deepcopy(model), (ids, labels), passes=[LinearCrossEntropy(3)], backend="aot_eager")
    for run in (model, opt):
        loss = run(ids, labels)
        loss.backward()
        assert torch.isnan(loss)
        assert not any(p.grad.any() for p in run.parameters() if p.grad is not None)


def test_the_gradient_of_the_loss_may_be_any_number() -> None:
    model, inputs = LanguageModel(), batch()
    opt = graphopt.optimize(copy.deepcopy(model), inputs, passes=[LinearCrossEntropy(4)], backend="aot_eager")
    for run in (model, opt):
        (run(*inputs) * -1234.5).backward()
        (run(*inputs) / 7).backward()  # gradients are accumulated
    for parameter, other in zip(model.parameters(), opt.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-4, atol=1e-4)
    assert opt.report.sections["linear_cross_entropy"]["chunks"] == {"head.weight": 4}


def test_outputs_beside_the_loss_that_are_differentiated_keep_their_gradient() -> None:
    model, inputs = LanguageModel("returned"), batch()
    opt = graphopt.optimize(copy.deepcopy(model), inputs, passes=[LinearCrossEntropy(4)], backend="aot_eager")
    for _ in range(2):
        for run in (model, opt):
            run.zero_grad()
            loss, logits = run(*inputs)
            (loss + logits.square().mean()).backward()
        for parameter, other in zip(model.parameters(), opt.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "change",
    [
        lambda g: g.clamp(-1e-3, 1e-3), lambda g: g * g.abs(), lambda g: g / g.norm(),
        *[lambda g, d=d: g.to(d).to(g.dtype) for d in (torch.bool, torch.int32, torch.float8_e5m2, torch.float8_e4m3fn)],
    ],
)  # fmt: skip
def test_a_gradient_that_a_hook_changes_is_left_whole(change: Any) -> None:
    """A chunk's gradient is scaled by the loss's afterwards, which is the same for what is linear in it alone."""

    class Hooked(LanguageModel):
        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            logits = self.head(torch.tanh(self.layer(self.embed(ids))))
            logits.register_hook(change)
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    model, inputs = Hooked(), batch()
    opt = graphopt.optimize(copy.deepcopy(model), inputs, passes=[LinearCrossEntropy(4)], backend="aot_eager")
    for run in (model, opt):
        (run(*inputs) * 100).backward()
    for parameter, other in zip(model.parameters(), opt.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad)


@pytest.mark.parametrize("form", ["mean", "returned"])
def test_the_predicted_peak_is_smaller(form: str) -> None:
    """32 x 400 logits of 8 numbers each: logits and their gradients are most of a step."""
    graph = capture(LanguageModel(form, vocabulary=400), batch(4, 64, 400), symbolic=False)
    chunked, _ = run_pass(LinearCrossEntropy(8), graph, ["head.weight"])
    before, after = (step_memory(g, "aot_eager", None) for g in (graph, chunked))
    rest = (after.peak_bytes - after.static_bytes) / (before.peak_bytes - before.static_bytes)
    assert rest < (0.35 if form == "mean" else 0.6)


def test_what_cannot_be_divided_is_left_alone_with_a_reason() -> None:
    class PerToken(LanguageModel):
        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            logits = self.head(self.layer(self.embed(ids)))
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").square().mean()

    class Mixed(LanguageModel):
        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            logits = self.head(self.layer(self.embed(ids))).flatten(0, 1)
            return F.cross_entropy(logits - logits.mean(0), labels.flatten())

    class ByVocabulary(LanguageModel):
        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(self.head(self.layer(self.embed(ids))).transpose(1, 2), labels)

    whole = "make them (tokens, vocabulary)"
    for model, reason in ((PerToken(), "read again by them"), (Mixed(), "read again by them"), (ByVocabulary(), whole)):
        found, left = find_heads(prepared(capture(model, batch(), symbolic=False)))
        assert not found
        assert reason in left["head.weight"]
    opt = graphopt.optimize(model, batch(), passes=[LinearCrossEntropy(4)], backend="aot_eager")
    opt(*batch()).backward()
    assert whole in opt.report.left_alone["head.weight"]
    with pytest.raises(PassError, match="no such head"):
        run_pass(LinearCrossEntropy(), capture(LanguageModel(), batch(), symbolic=False), ["layer.weight"])
    with pytest.raises(PassError, match="chunks=0 must be a whole number of at least 1"):
        LinearCrossEntropy(0)


def test_beside_a_sampler_a_head_is_divided_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows of its gradients are computed then: by itself a sampler would leave some out."""
    monkeypatch.setattr("graphopt.passes.linear_cross_entropy.technique.LEAST_BYTES", 0)
    asked = [LinearCrossEntropy(4), Vcas(keep_rows=0.5)]
    for passes, changed in ((asked, ("head.weight",)), ([Vcas(keep_rows=0.5), LinearCrossEntropy()], ())):
        opt = graphopt.optimize(LanguageModel(), batch(), passes=passes, backend="aot_eager")
        opt(*batch()).backward()
        assert opt.last_step is not None
        assert opt.last_step.reports[0].changes.changed == changed
    model, inputs = LanguageModel(vocabulary=9000), batch(4, 16, 9000)
    small = graphopt.Budget(memory="6MB", variance=0.05)
    opt = graphopt.optimize(model, inputs, small, backend="aot_eager", optimizer=torch.optim.SGD(model.parameters()))
    opt(*inputs).backward()
    assert opt.last_step is not None
    assert ("head.weight",) in [report.changes.changed for report in opt.last_step.reports]


def test_small_logits_are_left_whole_by_themselves() -> None:
    opt = graphopt.optimize(LanguageModel(), batch(), backend="aot_eager")
    assert opt.report.plan is not None
    assert opt.report.plan.not_needed["linear_cross_entropy"] == "no logits are large enough"


def test_large_logits_are_divided_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphopt.passes.linear_cross_entropy.technique.LEAST_BYTES", 1000)
    monkeypatch.setattr("graphopt.passes.linear_cross_entropy.technique.FEWEST_TOKENS", 4)
    monkeypatch.setattr("graphopt.passes.linear_cross_entropy.technique.SLOWER", 1e3)
    model, inputs = LanguageModel(), batch(8, 16)
    opt = graphopt.optimize(copy.deepcopy(model), inputs, backend="aot_eager")
    for run in (model, opt):
        run(*inputs).backward()
    for parameter, other in zip(model.parameters(), opt.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad)
    assert opt.report.sections["linear_cross_entropy"]["chunks"] == {"head.weight": 32}
    assert "cross entropy    head.weight in 32 chunks of tokens" in str(opt.report)
    assert not [note for note in opt.report.notes if "could not" in note]


def of_transformers(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A tiny language model without dropout."""
    import transformers

    common = {
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 60,
        "max_position_embeddings": 32,
    }  # fmt: skip
    none = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
    options: dict[str, dict[str, Any]] = {
        "BertForMaskedLM": {**common, **none},
        "T5ForConditionalGeneration": {
            "d_model": 16, "num_layers": 1, "num_heads": 2, "d_kv": 8, "d_ff": 32, "vocab_size": 60, "dropout_rate": 0,
            "decoder_start_token_id": 0,
        },
        "GPT2LMHeadModel": {
            "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 60, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0,
        },
        "OPTForCausalLM": {**common, "ffn_dim": 32, "word_embed_proj_dim": 16, "dropout": 0},
        "PhiForCausalLM": {**common, "resid_pdrop": 0, "embd_pdrop": 0},
        "BloomForCausalLM": {"hidden_size": 16, "n_layer": 1, "n_head": 2, "vocab_size": 60},
        "FalconForCausalLM": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 60},
    }  # fmt: skip
    of_heads = {**common, "num_key_value_heads": 2, **({"head_dim": 8} if name.startswith(("Gemma", "Qwen3")) else {})}
    torch.manual_seed(0)
    made = getattr(transformers, name)
    config = made.config_class(**options.get(name, of_heads))
    config.pad_token_id = config.pad_token_id or 0
    config.use_cache = False
    ids = torch.randint(3, 50, (2, 9))
    labels = ids.clone()
    labels[:, :4] = -100
    return made(config).train(), {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize(
    "name",
    [
        "LlamaForCausalLM", "Gemma2ForCausalLM", "T5ForConditionalGeneration", "BertForMaskedLM",
        *long(
            "GPT2LMHeadModel", "OPTForCausalLM", "GemmaForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM", "PhiForCausalLM",
            "BloomForCausalLM", "FalconForCausalLM", "CohereForCausalLM", "GraniteForCausalLM",
        ),
    ],
)  # fmt: skip
def test_language_models_of_transformers(name: str) -> None:
    model, inputs = of_transformers(name)
    of_any_type = {"BertForMaskedLM": BOTH, "T5ForConditionalGeneration": (torch.float64,)}
    dtypes = of_any_type.get(name, (torch.float32,))  # others compute it in float32
    report = checked(model, inputs, dtypes=dtypes).report
    assert len(report.changes.changed) == 1
    assert report.step_flops_after == report.step_flops_before
