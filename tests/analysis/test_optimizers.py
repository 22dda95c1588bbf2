"""States and temporaries of optimizers, against real ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from graphopt import InputError
from graphopt.analysis.optimizers import named_optimizer, optimizer_memory
from graphopt.graph import Parameter
from tests.measure import peak_and_rest

CPU = torch.device("cpu")
SHAPES = [(64, 33), (33,), (128, 64)]
TRAINED = [Parameter(f"p{i}", shape, torch.float32, True) for i, shape in enumerate(SHAPES)]


@pytest.mark.parametrize("form", ["", "-loop", "-foreach", "-fused"])
@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "adamw"])
def test_states_and_temporaries_are_the_real_optimizers(name: str, form: str) -> None:
    found = optimizer_memory(name + form, TRAINED, CPU)
    parameters = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    optimizer = named_optimizer(name + form, CPU)(parameters)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    tensors = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    assert sum(size for _, _, size in found.states) == sum(t.numel() * t.element_size() for t in tensors)
    measured, rest = peak_and_rest(optimizer.step)
    assert rest == 0
    changes = [0] * (len(found.operators) + 1)
    for t in found.temporaries:
        changes[t.born] += t.size
        changes[t.last + 1] -= t.size
    predicted = max(sum(changes[: i + 1]) for i in range(len(changes)))
    assert predicted == pytest.approx(measured, abs=64)


def test_eight_bit_states_take_a_byte_per_element_and_a_scale_per_block() -> None:
    states = optimizer_memory("adamw8bit", TRAINED, CPU).states
    sizes = {name: sum(s for n, _, s in states if n == name) for name in ("p0", "p1", "p2")}
    # p0 and p1 have fewer than 4096 elements and keep float32 states.
    assert sizes == {"p0": 2 * 4 * 64 * 33, "p1": 2 * 4 * 33, "p2": 2 * (128 * 64 + 4 * 32)}


def test_master_weights_add_copies_and_float32_states() -> None:
    half = [Parameter("w", (10, 10), torch.bfloat16, True)]
    plain, master = (optimizer_memory("adamw-loop", half, CPU, master_weights=m) for m in (False, True))
    assert sum(s for *_, s in plain.states) == 2 * 2 * 100 + 4
    assert sum(s for *_, s in master.states) == 4 * 100 + 2 * 4 * 100 + 4
    assert max(t.size for t in master.temporaries) >= 4 * 100


def test_float32_gradients_of_master_weights_are_there_in_8_bit_too() -> None:
    half = [Parameter("w", (128, 64), torch.bfloat16, True), Parameter("v", (100,), torch.bfloat16, True)]
    loop, eight = (optimizer_memory(name, half, CPU, master_weights=True) for name in ("adamw-loop", "adamw8bit"))
    gradients = [t for t in eight.temporaries if t.name.startswith("float32 gradient")]
    assert [t.size for t in gradients] == [4 * 128 * 64, 4 * 100]
    assert [(t.name, t.size, t.born) for t in gradients] == [(t.name, t.size, t.born) for t in loop.temporaries[:2]]
    assert all(t.last == len(eight.operators) - 1 for t in gradients)


class Passing(torch.optim.SGD):
    """An optimizer that hands its options on."""

    def __init__(self, params: list[nn.Parameter], **options: float) -> None:
        super().__init__(params, **options)


def test_a_learning_rate_may_be_a_tensor_and_options_may_have_no_names() -> None:
    given = torch.optim.AdamW([nn.Parameter(torch.ones(1))], lr=torch.tensor(1e-3))
    assert optimizer_memory(given, TRAINED, CPU).states == optimizer_memory("adamw-loop", TRAINED, CPU).states
    momentum = optimizer_memory(Passing([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9), TRAINED, CPU)
    assert momentum.states == optimizer_memory("momentum", TRAINED, CPU).states


class Counted(torch.optim.SGD):
    """Counts its steps."""

    steps = 0

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        Counted.steps += 1
        super().step()


def test_a_trial_is_made_once_for_equal_options_and_tensors() -> None:
    momenta, found = (0.0, 0.0, 0.9, 0.0), []
    for momentum in momenta:
        given = Counted([nn.Parameter(torch.ones(1))], lr=0.1, momentum=momentum)
        found.append(optimizer_memory(given, TRAINED, CPU))
    assert Counted.steps == 4  # two of each trial
    assert found[0] == found[1] == found[3] != found[2]
    assert optimizer_memory(given, TRAINED[:2], CPU) != found[3]
    steps = sum(size for _, name, size in optimizer_memory("adamw", TRAINED, CPU).states if name == "step")
    torch.set_default_dtype(torch.float64)
    try:
        doubled = sum(size for _, name, size in optimizer_memory("adamw", TRAINED, CPU).states if name == "step")
    finally:
        torch.set_default_dtype(torch.float32)
    assert doubled == 2 * steps
    functions = (lambda p: Counted(p, momentum=momenta[-1]), lambda p: Counted(p, momentum=momenta[2]))
    assert [len(optimizer_memory(function, TRAINED, CPU).states) for function in functions] == [0, 3]


def test_an_optimizer_or_a_function_is_taken_as_it_is() -> None:
    given = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.5)
    assert sum(s for *_, s in optimizer_memory(given, TRAINED, CPU).states) == 4 * sum(64 * 33 for _ in "a") + 4 * (33 + 128 * 64)
    made = optimizer_memory(lambda p: torch.optim.RMSprop(p), TRAINED, CPU)
    assert made.states
    assert optimizer_memory(None, TRAINED, CPU).states == ()


@pytest.mark.parametrize("name", ["lion", "adamw-sharded", "", 3])
def test_an_unknown_optimizer_is_refused_with_the_names(name: object) -> None:
    with pytest.raises(InputError, match="adamw8bit"):
        optimizer_memory(name, TRAINED, CPU)  # type: ignore[arg-type]


def test_an_optimizer_that_reads_values_cannot_be_tried() -> None:
    with pytest.raises(InputError, match="cannot be found by a trial"):
        optimizer_memory(lambda p: torch.optim.Adafactor(p), TRAINED, CPU)
