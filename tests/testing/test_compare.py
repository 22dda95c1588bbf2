import math

import torch

from graphopt.testing.compare import compare_gradients, compare_values, tolerance_of


def test_the_first_tensor_that_differs_is_named_with_its_error() -> None:
    eager = {"a": torch.tensor([4.0, 0.0]), "b": torch.tensor([1.0, 2.0])}
    ours = {"a": torch.tensor([4.0, 0.0]), "b": torch.tensor([1.0, 1.0])}
    assert compare_gradients(eager, eager, eager, 1e-6).difference == ""
    found = compare_gradients(ours, eager, eager, 1e-2)
    assert found.error == 0.25
    assert found.difference == "the gradient of b differs from eager's by 2.50e-01 of the largest entry"
    assert compare_values(ours, eager, 1e-2).difference.startswith("b differs from eager's by 3.33e-01")
    assert compare_values(ours, eager, 0.5).error == 1 / 3


def test_missing_and_superfluous_tensors() -> None:
    one = torch.ones(2)
    assert "a is missing" in compare_gradients({"a": None}, {"a": one}, ["a"], 1.0).difference
    assert "a is missing" in compare_gradients({"a": one}, {"a": None}, ["a"], 1.0).difference
    assert "a is missing" in compare_gradients({}, {"a": one}, ["a"], 1.0).difference
    assert "although none is computed for it" in compare_gradients({"a": one}, {"a": one}, [], 1.0).difference
    assert "b is there in eager mode or here" in compare_values({}, {"b": one}, 1.0).difference
    assert "b is there in eager mode or here" in compare_values({"b": one}, {}, 1.0).difference
    assert "shape [3]" in compare_values({"b": torch.ones(3)}, {"b": one}, 1.0).difference
    assert "of b has shape [3], eager's has [2]" in compare_gradients({"b": torch.ones(3)}, {"b": one}, ["b"], 1.0).difference


def test_what_is_not_finite_must_be_so_on_both_sides() -> None:
    bad = torch.tensor([math.nan, math.inf, 1.0])
    assert not compare_values({"a": bad}, {"a": bad.clone()}, 1e-6).difference
    assert not compare_gradients({"a": bad}, {"a": bad.clone()}, ["a"], 1e-6).difference
    for other in (
        torch.tensor([0.0, math.inf, 1.0]),
        torch.tensor([math.nan, 9.0, 1.0]),
        torch.tensor([math.nan, -math.inf, 1.0]),
    ):
        for ours, eager in ((bad, other), (other, bad)):
            assert compare_values({"a": ours}, {"a": eager}, 1e-6).difference
            assert compare_gradients({"a": ours}, {"a": eager}, ["a"], 1e-6).difference


def test_integers_complex_numbers_and_empty_tensors() -> None:
    pairs = [
        (torch.tensor([1, 2]), torch.tensor([1, 3])),
        (torch.tensor([True]), torch.tensor([False])),
        (torch.tensor([1 + 2j]), torch.tensor([1 + 3j])),
    ]
    for ours, eager in pairs:
        assert compare_values({"a": ours}, {"a": eager}, 1e-3).difference
        assert not compare_values({"a": eager}, {"a": eager}, 1e-3).difference
    assert not compare_values({"a": torch.empty(0)}, {"a": torch.empty(0)}, 0.0).difference


def test_the_coarsest_type_sets_the_tolerance() -> None:
    assert tolerance_of([torch.float64]) < tolerance_of([torch.float64, torch.float32]) < tolerance_of([torch.float16])
    assert tolerance_of([torch.complex128]) == tolerance_of([torch.float64])
    assert tolerance_of([]) == tolerance_of([torch.int64]) == tolerance_of([torch.float32])
