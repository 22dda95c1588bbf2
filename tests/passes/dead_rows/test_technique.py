"""Rows that nobody reads are not computed, and no gradient changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphopt.passes import DeadRows, run_pass
from graphopt.passes.dead_rows.demand import find_demands
from graphopt.passes.dead_rows.places import Rows
from torch import Tensor, nn

import graphopt
from graphopt import PassError
from graphopt.capture import capture
from graphopt.graph import TrainingGraph
from graphopt.testing import PassCheck, check_pass
from tests.long_forms import long

WIDTH = 8


def everything(graph: TrainingGraph) -> list[str]:
    return [site.name for site in DeadRows().applicable(graph)]


def checked(model: nn.Module, *args: Any, both: bool = False) -> PassCheck:
    """The pass held to its contract on a graph of any batch size; if `both`, in float32 on one of this size as well."""
    dtypes = (torch.float64, torch.float32) if both else (torch.float64,)
    return check_pass(DeadRows(), model, args or (batch(),), everything, dtypes=dtypes)[-1]


def batch(samples: int = 3, rows: int = 6, width: int = WIDTH) -> Tensor:
    return torch.randn(samples, rows, width)


class Block(nn.Module):
    """A transformer's block, written out."""

    def __init__(self, heads: int = 2, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.first(x)
        split = (layer(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        mixed = nn.functional.scaled_dot_product_attention(*split, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


def stack(blocks: int, **options: Any) -> nn.Sequential:
    """Blocks; or, if there is to be none, a layer that mixes no rows, which is traced in a tenth of the time."""
    return nn.Sequential(*(Block(**options) for _ in range(blocks)) if blocks else (nn.Linear(WIDTH, WIDTH), nn.Tanh()))


class Classifier(nn.Module):
    """Blocks, and a head that reads what `pick` takes of their output."""

    def __init__(self, pick: Callable[[Tensor], Tensor], blocks: int = 1, **options: Any) -> None:
        super().__init__()
        self.blocks = stack(blocks, **options)
        self.head = nn.Linear(WIDTH, 3)
        self.pick = pick

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pick(self.blocks(x))).square().mean()


def first_row(x: Tensor) -> Tensor:
    return x[:, 0]


class Rowwise(nn.Module):
    """Layers that mix no rows; all but the rows that are read are dead, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 16, bias=False), nn.Linear(16, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))[:, 2].square().sum()


def test_the_graph_of_layers_that_mix_no_rows() -> None:
    graph, report = run_pass(DeadRows(), capture(Rowwise(), (torch.randn(3, 6, WIDTH),)), ["the output"])
    assert report.step_flops_after == report.step_flops_before // 6
    shapes = [tuple(graph.at(s, 3) for s in n.meta["val"].shape) for n in graph.graph.nodes if "mm" in n.name]
    assert shapes == [(3, 16), (3, 4), (4, 16), (3, 16), (16, 8)]


@pytest.mark.parametrize(
    ("pick", "rows", "blocks"),
    [
        (first_row, Rows(6, 0, 1), 0),
        (lambda x: x[:, -1], Rows(6, 5, 6), 0),
        (lambda x: x[:, 2:4].flatten(1)[:, :WIDTH], Rows(6, 2, 4), 1),
        (lambda x: x[:, 1] + x[:, 3], Rows(6, 1, 4), 0),
        (lambda x: x.narrow(1, 4, 2).sum(1), Rows(6, 4, 6), 0),
        (lambda x: x.transpose(0, 1)[0], Rows(6, 0, 1), 0),
    ],
)
def test_a_classifier_that_reads_some_rows(pick: Callable[[Tensor], Tensor], rows: Rows, blocks: int) -> None:
    model, x = Classifier(pick, blocks).double(), batch().double()
    graph = capture(model, (x,))
    (demand,) = [d for d in find_demands(graph) if d.rows.length == 6]
    assert demand.rows == rows
    (found,) = check_pass(DeadRows(), model, (x,), everything, dtypes=[torch.float64], captured={torch.float64: graph})
    assert found.report.changes.changed == ("head.weight",)
    assert found.report.step_flops_before - found.report.step_flops_after >= demand.flops * 0.99


def test_the_last_block_is_computed_for_one_row_but_for_its_keys_and_values() -> None:
    samples, rows = 3, 6
    found = checked(Classifier(first_row), both=True)
    product = 2 * samples * WIDTH * WIDTH  # of one row of each sample with a square matrix
    scores = 2 * samples * WIDTH * rows  # one query of each sample with all keys
    layers = 3 * (2 * rows + 1 + 1 + 4) * product  # forward, dW, dX of key and value, query, output, and the feed-forward
    attention = (2 + 5) * scores
    head = 3 * 2 * samples * WIDTH * 3
    assert found.report.step_flops_after == layers + attention + head


def test_where_all_rows_are_an_output_the_backward_alone_is_narrowed() -> None:
    class Both(Classifier):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            hidden = self.blocks(x)
            return self.head(hidden[:, 0]).square().mean(), hidden.detach()

    found = checked(Both(lambda x: x))
    (narrowed,) = find_demands(capture(Classifier(first_row).double(), (batch().double(),)))
    assert found.report.changes.changed == ("head.weight",)
    assert 0 < found.report.step_flops_before - found.report.step_flops_after < narrowed.flops


@pytest.mark.parametrize(
    "pick",
    [
        lambda x: x.mean(1),
        lambda x: x[:, 1:].mean(1),
        lambda x: x[:, 0] + x.mean(1),
        lambda x: x.cumsum(1)[:, 1],
        lambda x: x[:, ::2].mean(1),
        lambda x: x.flip(1)[:, 0] + x[:, :5].amax(1),
        lambda x: torch.cat([x, x], 1)[:, 0],
        lambda x: x.softmax(1)[:, 0],
    ],
)
def test_where_all_rows_are_read_or_mix_at_once_nothing_is_done(pick: Callable[[Tensor], Tensor]) -> None:
    assert everything(capture(Classifier(pick, blocks=0), (batch(),), symbolic=False)) == []


def test_a_plan_says_that_no_rows_are_dead() -> None:
    opt = graphopt.optimize(Classifier(lambda x: x.mean(1)), (batch(),), backend="aot_eager")
    assert opt.report.plan is not None
    assert "no rows" in opt.report.plan.not_needed["dead_rows"]
    assert "dead_rows" not in opt.report.passes


def test_causal_attention_stays_whole_and_what_follows_it_does_not() -> None:
    causal, free = (checked(Classifier(lambda x: x[:, -1], causal=c)).report for c in (True, False))
    assert free.step_flops_after < causal.step_flops_after < causal.step_flops_before


def test_dropout_draws_the_numbers_that_eager_mode_draws() -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, 16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            hidden = nn.functional.dropout(self.first(x), 0.5).relu()
            rows_first = self.second(hidden).transpose(0, 1)  # in memory, they are still behind samples
            return nn.functional.dropout(rows_first, 0.3)[1].square().sum()

    model, x = Dropping(), batch()
    opt = graphopt.optimize(copy.deepcopy(model), (x,), backend="aot_eager")
    for seed in range(3):
        losses = []
        for run in (model, opt):
            run.zero_grad()
            torch.manual_seed(seed)
            losses.append(run(x))
            losses[-1].backward()
        torch.testing.assert_close(losses[0], losses[1])
        for parameter, other in zip(model.parameters(), opt.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, other.grad)
    assert opt.report.sections["dead_rows"]["rows"] == {"the output": "row 1 of 6"}


def test_report_budget_and_unknown_names() -> None:
    model = Classifier(first_row, blocks=2)
    opt = graphopt.optimize(model, (batch(),), budget=0.6, backend="aot_eager")
    alone = graphopt.optimize(model, (batch(),), budget=0.6, passes=["greentrainer"], backend="aot_eager")
    assert opt.report.trained > alone.report.trained  # what is saved trains more
    assert opt.report.flops_ratio <= 0.6
    assert "dead rows        head.weight reads row 0 of 6" in str(opt.report)
    with pytest.raises(PassError, match=r"head reads all rows: some rows are read alone by head\.weight"):
        run_pass(DeadRows(), capture(model, (batch(),)), ["head"])


def test_another_batch_size_and_another_length() -> None:
    model = Classifier(lambda x: x[:, -1])
    opt = graphopt.optimize(copy.deepcopy(model), (batch(),), backend="aot_eager")
    for samples, rows in ((3, 6), (5, 9), (2, 1), (1, 4)):
        x = batch(samples, rows)
        for run in (model, opt):
            run.zero_grad()
            run(x).backward()
        for parameter, other in zip(model.parameters(), opt.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, other.grad)


DECODERS = ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma")


def transformers_model(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A tiny classifier and a batch."""
    import transformers

    common = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "num_labels": 4}
    text = {**common, "vocab_size": 50, "max_position_embeddings": 32, "pad_token_id": 0}
    decoder = {**text, "num_key_value_heads": 2, "head_dim": 8}
    image = {**common, "image_size": 8, "patch_size": 2}
    own = {
        "GPT2": {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 50, "num_labels": 4, "pad_token_id": 0},
        "OPT": {**common, "ffn_dim": 32, "word_embed_proj_dim": 16, "vocab_size": 50, "pad_token_id": 0},
        "XLNet": {"d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 32, "vocab_size": 50, "num_labels": 4},
        "DistilBert": {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 32, "vocab_size": 50, "num_labels": 4},
        "Beit": {**image, "use_mean_pooling": False},
        "ViT": image,
        "DeiT": image,
    }
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**own.get(name, decoder if name in DECODERS else text))
    of_images = name in ("ViT", "DeiT", "Beit")
    model = getattr(transformers, f"{name}For{'Image' if of_images else 'Sequence'}Classification")(config)
    inputs = {"pixel_values": torch.randn(3, 3, 8, 8)} if of_images else {"input_ids": torch.randint(3, 49, (3, 7))}
    if "input_ids" in inputs:
        inputs["input_ids"][0, 4:] = 0  # padding
        inputs["attention_mask"] = (inputs["input_ids"] != 0).long()
    return model.train(), {**inputs, "labels": torch.randint(0, 4, (3,))}


@pytest.mark.parametrize(
    "name",
    ["Bert", "DeiT", "XLNet", *long("Roberta", "Electra", "DistilBert", "Albert", "MPNet", "Camembert", "ViT", "Beit")],
)
def test_architectures_whose_classifier_reads_one_row(name: str) -> None:
    assert trains_as_eager_mode(name) < 0.9


@pytest.mark.parametrize("name", ["Llama", *long("GPT2", "OPT", *DECODERS[1:])])
def test_decoders_whose_classifier_reads_the_last_token_that_is_no_padding(name: str) -> None:
    assert trains_as_eager_mode(name) < 0.97


def trains_as_eager_mode(name: str) -> float:
    """The part of the FLOPs that is left, of a model that is found to read one row, or one of each sample."""
    model, inputs = transformers_model(name)
    opt = graphopt.optimize(copy.deepcopy(model), inputs, backend="aot_eager")
    losses = []
    for run in (model, opt):
        torch.manual_seed(0)  # dropout included
        losses.append(run(**inputs).loss)
        losses[-1].backward()
    torch.testing.assert_close(losses[0], losses[1])
    largest = max(p.grad.abs().max() for p in model.parameters() if p.grad is not None)
    for parameter, other in zip(model.parameters(), opt.parameters(), strict=True):
        if parameter.grad is not None:
            assert (parameter.grad - other.grad).abs().max() <= 1e-5 * largest
    assert len(opt.report.sections["dead_rows"]["rows"]) == 1
    return opt.report.flops_ratio


class OfEach(nn.Module):
    """Reads one row of each sample, whose number `where` finds."""

    def __init__(self, where: Callable[[Tensor, Tensor], Tensor], causal: bool = False, blocks: int = 0) -> None:
        super().__init__()
        self.blocks = stack(blocks, causal=causal)
        self.dropout, self.head, self.where = nn.Dropout(0.0), nn.Linear(WIDTH, 3), where

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden = self.head(self.dropout(self.blocks(x)))
        return hidden[torch.arange(x.shape[0]), self.where(mask, hidden)].square().mean()


def last_kept(mask: Tensor, hidden: Tensor) -> Tensor:
    return (torch.arange(mask.shape[1]) * mask).argmax(-1)


def padded(samples: int = 3, rows: int = 6) -> tuple[Tensor, Tensor]:
    mask = torch.ones(samples, rows, dtype=torch.int64)
    for sample in range(samples):
        mask[sample, 1 + sample % rows :] = 0
    return batch(samples, rows), mask


@pytest.mark.parametrize(("causal", "blocks"), [(False, 1), (True, 1), *long((True, 2))])
def test_a_row_of_each_sample_that_is_computed(causal: bool, blocks: int) -> None:
    model = OfEach(last_kept, causal, blocks)
    if causal:
        model.blocks.insert(0, nn.Linear(WIDTH, WIDTH))  # whose rows a block needs
    check = checked(model, *padded(), both=causal)
    assert check.report.changes.changed == ("the output",)
    assert check.report.step_flops_after < 0.93 * check.report.step_flops_before


def test_rows_of_each_sample_are_counted_from_the_end_where_negative() -> None:
    assert checked(OfEach(lambda mask, _: last_kept(mask, mask) - 6), *padded()).report.changes.changed


def test_a_row_that_is_chosen_by_what_is_computed_is_not_known_before() -> None:
    chosen = OfEach(lambda mask, hidden: (hidden.detach().sum(-1) * mask).argmax(-1), blocks=1)
    changes = checked(chosen, *padded()).report.changes
    assert not changes.changed


def test_all_rows_stay_where_the_same_tensor_is_read_in_full() -> None:
    class Both(OfEach):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            hidden = self.blocks(x)
            one = hidden[torch.arange(x.shape[0]), last_kept(mask, hidden)]
            return self.head(one).square().mean() + hidden.sum()

    checked(Both(last_kept), *padded())


def test_rows_of_another_order_of_samples_are_left_alone() -> None:
    class Turned(OfEach):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            hidden = self.head(self.blocks(x))
            return hidden[torch.arange(x.shape[0]).flip(0), last_kept(mask, hidden)].square().mean()

    with pytest.raises(AssertionError, match="no site"):
        assert everything(capture(Turned(last_kept), padded())), "no site"


def test_samples_and_rows_that_change_places() -> None:
    class Turned(OfEach):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            samples, rows = x.shape[:2]
            hidden = self.blocks(x).permute(2, 0, 1).reshape(WIDTH, samples * rows).t().reshape(samples, rows, WIDTH)
            return self.head(hidden)[torch.arange(samples), last_kept(mask, hidden)].square().mean()

    for samples in (1, 2, WIDTH):
        checked(Turned(last_kept), *padded(samples, 4), both=samples == WIDTH)


@pytest.mark.parametrize("value", [lambda head: head.weight[0], lambda head: head.weight[:1] * 2, lambda head: head.bias[0]])
def test_what_is_put_in_one_row_of_each_sample_may_be_the_same_for_all(value: Callable[[nn.Linear], Tensor]) -> None:
    """It has no sizes of its own for samples then, and is no gradient of rows."""

    class Put(OfEach):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            hidden, rows = self.blocks(x), (torch.arange(x.shape[0]), last_kept(mask, x))
            put = torch.zeros_like(x).index_put(rows, value(self.head))
            return self.head(hidden[rows]).square().mean() + (hidden * put).pow(3).sum()

    checked(Put(last_kept), *padded())
    checked(Put(last_kept), *padded(WIDTH, WIDTH), both=True)


def test_a_row_of_each_sample_with_dropout_and_other_batches() -> None:
    model = OfEach(last_kept, causal=True, blocks=1)
    model.dropout.p = 0.3
    opt = graphopt.optimize(copy.deepcopy(model), padded(), passes=[DeadRows()], backend="aot_eager")
    assert "one row of 6 of each sample" in str(opt.report)
    for samples in (3, 5, 1):
        inputs, found = padded(samples), []
        for each in (model, opt):
            each.zero_grad()
            torch.manual_seed(0)
            loss = each(*inputs)
            loss.backward()
            found.append([loss.detach(), *(p.grad for p in each.parameters())])
        for ours, eager in zip(*found, strict=True):
            torch.testing.assert_close(ours, eager)


@pytest.mark.parametrize("rows", [slice(1, 3), 2, *long(slice(0, 1))])
def test_where_the_length_is_a_symbol_rows_from_the_front_are_followed(rows: Any) -> None:
    """A budget holds for batches of other lengths, too."""

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
            self.norm = nn.LayerNorm(6)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = self.norm(x + nn.functional.dropout(torch.tanh(layer(x)), 0.2))
            return x[:, rows].square().sum()

    model = First()
    opt = graphopt.optimize(model, (torch.randn(4, 8, 6),), passes=["dead_rows"], backend="aot_eager")
    for samples, length in ((4, 8), (4, 12), (4, 5), (3, 7)):
        x = torch.randn(samples, length, 6)
        torch.manual_seed(1)
        wanted = torch.autograd.grad(model(x), list(model.parameters()))
        torch.manual_seed(1)
        model.zero_grad()
        opt(x).backward()
        assert opt.last_step is not None
        report = opt.last_step.reports[0]
        assert report.step_flops_after < 0.5 * report.step_flops_before
        for parameter, gradient in zip(model.parameters(), wanted, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)
    assert opt.counters.compilations <= 3
