"""What a front end can get wrong without a word about inputs that are no rows of one batch, or no ordinary tensors.

Most cases were found by comparing many models with eager mode; each is the smallest model that shows it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt
from tests.frontend.stepping import (
    BUDGETS,
    Two,
    X,
    assert_fails_as_under_torch_compile,
    assert_steps_as_in_eager,
    generated,
    plainly,
)
from tests.long_forms import long
from tests.messages import warnings_of


class Ignoring(Two):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x)


@BUDGETS
def test_an_input_that_forward_ignores(budget: float | None) -> None:
    def batch(n: int) -> dict[str, Tensor]:
        return {"x": generated(n, n, 5), "mask": torch.ones(n, 5)}

    with warnings_of() as warned:
        opt = assert_steps_as_in_eager(Ignoring(), batch(4), lambda called, _, step: called(**batch((4, 6, 3)[step])), budget)
    assert (warned, opt.report.notes) == ([], [])


@BUDGETS
def test_lists_of_targets_of_different_lengths(budget: float | None) -> None:
    class Detector(Two):
        def forward(self, x: Tensor, targets: list[dict[str, Tensor]]) -> Tensor:
            found = self.b(torch.tanh(self.a(x)))
            losses = [nn.functional.l1_loss(found[i].expand_as(t["boxes"]), t["boxes"]) for i, t in enumerate(targets)]
            return sum(losses)  # type: ignore[return-value]

    def batch(step: int) -> Any:
        return generated(step, 3, 5), [{"boxes": generated(step + n, n, 5)} for n in (1, 2, 3 + step)]

    assert_steps_as_in_eager(Detector(), batch(9), lambda called, _, step: called(*batch(step)), budget)


@BUDGETS
def test_two_texts_of_different_lengths_with_negatives_from_the_batch(budget: float | None) -> None:
    class Sentences(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.layer = nn.Embedding(97, 16), nn.Linear(16, 16)

        def forward(self, features: list[dict[str, Tensor]]) -> Tensor:
            a, b = (
                nn.functional.normalize((self.layer(self.embed(f["ids"])) * f["mask"][..., None]).sum(1), dim=-1)
                for f in features
            )
            return nn.functional.cross_entropy(20 * a @ b.T, torch.arange(a.shape[0]))

    def batch(n: int, *lengths: int) -> Any:
        return (
            [
                {"ids": (generated(k, n, k).abs() * 30).long().clamp(0, 96), "mask": torch.ones(n, k, dtype=torch.long)}
                for k in lengths
            ],
        )

    sizes = ((4, 10, 12), (4, 9, 12), (4, 12, 12), (5, 4, 12), (4, 4, 4), (6, 8, 8))
    with warnings_of() as warned:
        assert_steps_as_in_eager(
            Sentences(), batch(*sizes[0]), lambda called, _, step: called(*batch(*sizes[step])), budget, steps=len(sizes)
        )
    assert warned == []


def test_a_sample_without_a_batch() -> None:
    class Unbatched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv1d(4, 3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.layer(x)).sum()

    assert_steps_as_in_eager(Unbatched(), (torch.zeros(4, 9),), lambda called, _, step: called(generated(step, 4, 9)))


@BUDGETS
@pytest.mark.parametrize("batch", [1, 3, *long(2)])
def test_a_permutation_given_as_an_argument(batch: int, budget: float | None) -> None:
    class Permuting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.w, self.v = nn.Linear(4, 4), nn.Parameter(torch.ones(1)), nn.Parameter(torch.tensor([0.9]))

        def forward(self, x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
            out = (self.layer(x).reshape(x.shape) * self.w).permute(dims)
            return (torch.sin(out) * self.v).sum(), out

    dims = (0, -2, -1, 1)
    example = torch.zeros(batch, 2, 3, 4), dims
    assert_steps_as_in_eager(
        Permuting(), example, lambda called, _, step: called(generated(step, batch, 2, 3, 4), dims)[0], budget
    )


class Plain(torch.autograd.Function):
    """A result that cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.clone()
        ctx.mark_non_differentiable(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def test_a_function_of_the_users_with_a_result_that_cannot_be_differentiated() -> None:
    class Custom(Two):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + Plain.apply(self.a(x)).sum()

    assert_fails_as_under_torch_compile(Custom(), X, plainly, "Expected fwd_out to be")


def test_kinds_of_tensors_that_come_later() -> None:
    class Sparse(Two):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.to_dense() if x.is_sparse else x)

    class Imaginary(Two):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.imag)

    def sparse(called: Any, model: Any, step: int) -> Tensor:
        x = generated(step, 4, 5)
        return called(x.to_sparse() if step % 2 else x)

    def conjugate(called: Any, model: Any, step: int) -> Tensor:
        x = torch.complex(generated(step, 4, 5), generated(step + 9, 4, 5))
        return called(x.conj() if step % 2 else x)

    for model, example, call in ((Sparse(), X, sparse), (Imaginary(), (torch.zeros(4, 5, dtype=torch.complex64),), conjugate)):
        eager_runs = graphopt.optimize(model, example, backend="aot_eager")
        for step in range(3):
            model.zero_grad()
            loss = call(eager_runs, model, step)
            loss.backward()
            ours = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            model.zero_grad()
            expected = call(model, model, step)
            expected.backward()
            torch.testing.assert_close(loss, expected)
            torch.testing.assert_close(ours, [p.grad for p in model.parameters()])


def test_a_ragged_tensor() -> None:
    class Ragged(Two):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.to_padded_tensor(0.0))

    def ragged(step: int) -> Tensor:
        rows = [generated(step + n, n, 5) for n in (2, 3 + step)]
        return torch.nested.nested_tensor(rows, layout=torch.jagged)

    assert_steps_as_in_eager(Ragged(), (ragged(0),), lambda called, _, step: called(ragged(step)))
