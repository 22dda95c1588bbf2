"""What several passes make of one graph, written out."""

from __future__ import annotations

import expecttest
import torch
from graphopt.passes import GreenTrainer, Lsp, RunLora, Vcas, run_pass
from graphopt.passes.runlora.orders import named_order
from graphopt.passes.vcas import ROWS, TOKENS
from torch import Tensor, nn

from graphopt.capture import capture
from graphopt.report.python_text import readable


class Adapted(nn.Module):
    """A layer with an adapter between two others."""

    def __init__(self) -> None:
        super().__init__()
        self.below = nn.Linear(3, 4, bias=False)
        self.weight = nn.Parameter(torch.randn(6, 4))
        self.down = nn.Parameter(torch.randn(2, 4))
        self.up = nn.Parameter(torch.randn(6, 2))
        self.above = nn.Linear(6, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.below(x))
        hidden = torch.relu(hidden @ self.weight.t() + 2.0 * (hidden @ self.down.t()) @ self.up.t())
        return self.above(hidden).square().sum()


class GoldenDumps(expecttest.TestCase):
    def test_a_merged_layer_on_three_rows_with_a_compressed_gradient_above_a_cut(self) -> None:
        graph = capture(Adapted(), (torch.randn(5, 3),))
        graph, _ = run_pass(GreenTrainer(), graph, {"weight", "down", "up", "above.weight"})
        graph, _ = run_pass(RunLora(), graph, {"weight": named_order("forward2", "backward5")})
        graph, _ = run_pass(Vcas(), graph, {ROWS + "weight": 0.6, TOKENS + "above.weight": 0.8})
        graph, _ = run_pass(Lsp(subspace=2, nonzeros=1), graph, {"weight": "activations"})
        text = readable(graph)
        self.assertExpectedInline(
            text[text.index("    # forward") :],
            """\
    # forward
    t: "float32[3, 4]" = aten.t.default(below_weight)
    mm: "float32[B, 4]" = aten.mm.default(input_0, t)
    relu: "float32[B, 4]" = aten.relu.default(mm)
    addmm_default: "float32[6, 4]" = aten.addmm.default(weight, up, down, alpha=2.0)
    t_default: "float32[4, 6]" = aten.t.default(addmm_default)
    mm_1: "float32[B, 6]" = aten.mm.default(relu, t_default)
    t_2: "float32[4, 2]" = aten.t.default(down)
    mm_2: "float32[B, 2]" = aten.mm.default(relu, t_2)
    mul_10: "float32[B, 2]" = aten.mul.Tensor(mm_2, 2.0)
    t_3: "float32[2, 6]" = aten.t.default(up)
    relu_1: "float32[B, 6]" = aten.relu.default(mm_1)
    t_4: "float32[6, 3]" = aten.t.default(above_weight)
    mm_4: "float32[B, 3]" = aten.mm.default(relu_1, t_4)
    pow_1: "float32[B, 3]" = aten.pow.Tensor_Scalar(mm_4, 2)
    sum_1: "float32[]" = aten.sum.default(pow_1)
    # backward
    expand: "float32[B, 3]" = aten.expand.default(grad_output_0, [B, 3])
    # forward
    pow_2: "float32[B, 3]" = aten.pow.Tensor_Scalar(mm_4, 1.0)
    mul_25: "float32[B, 3]" = aten.mul.Scalar(pow_2, 2.0)
    # backward
    mul_26: "float32[B, 3]" = aten.mul.Tensor(expand, mul_25)
    t_5: "float32[3, B]" = aten.t.default(mul_26)
    mul_tensor: "float32[3, B]" = aten.mul.Tensor(t_5, t_5)
    sum_dim_int_list: "float32[B]" = aten.sum.dim_IntList(mul_tensor, [0])
    sqrt_default: "float32[B]" = aten.sqrt.default(sum_dim_int_list)
    # forward
    mul_tensor_1: "float32[B, 6]" = aten.mul.Tensor(relu_1, relu_1)
    sum_dim_int_list_1: "float32[B]" = aten.sum.dim_IntList(mul_tensor_1, [1])
    sqrt_default_1: "float32[B]" = aten.sqrt.default(sum_dim_int_list_1)
    # backward
    mul_tensor_2: "float32[B]" = aten.mul.Tensor(sqrt_default, sqrt_default_1)
    # forward
    slice_tensor: "float64[2]" = aten.slice.Tensor(random_0, 0, 0, 2)
    # backward
    systematic_rows_default: "(int64[4], float64[4], float64[])" = graphopt.systematic_rows.default(mul_tensor_2, slice_tensor, 4)
    getitem: "int64[4]" = operator.getitem(systematic_rows_default, 0)
    getitem_1: "float64[4]" = operator.getitem(systematic_rows_default, 1)
    sqrt_default_2: "float64[4]" = aten.sqrt.default(getitem_1)
    index_select_default: "float32[4, 3]" = aten.index_select.default(mul_26, 0, getitem)
    t_default_1: "float32[3, 4]" = aten.t.default(index_select_default)
    _to_copy_default: "float32[4]" = aten._to_copy.default(sqrt_default_2, dtype=torch.float32)
    view_default: "float32[4]" = aten.view.default(_to_copy_default, [-1])
    mul_tensor_3: "float32[3, 4]" = aten.mul.Tensor(t_default_1, view_default)
    index_select_default_1: "float32[4, 6]" = aten.index_select.default(relu_1, 0, getitem)
    _to_copy_default_1: "float32[4]" = aten._to_copy.default(sqrt_default_2, dtype=torch.float32)
    view_default_1: "float32[4, 1]" = aten.view.default(_to_copy_default_1, [-1, 1])
    mul_tensor_4: "float32[4, 6]" = aten.mul.Tensor(index_select_default_1, view_default_1)
    mm_5: "float32[3, 6]" = aten.mm.default(mul_tensor_3, mul_tensor_4)
    t_6: "float32[6, 3]" = aten.t.default(mm_5)
    # forward
    t_7: "float32[3, 6]" = aten.t.default(t_4)
    # backward
    mm_6: "float32[B, 6]" = aten.mm.default(mul_26, t_7)
    _to_copy_default_2: "float64[B, 6]" = aten._to_copy.default(mm_6, dtype=torch.float64)
    mul_tensor_5: "float64[B, 6]" = aten.mul.Tensor(_to_copy_default_2, _to_copy_default_2)
    sum_dim_int_list_2: "float64[B]" = aten.sum.dim_IntList(mul_tensor_5, [1])
    sqrt_default_3: "float64[B]" = aten.sqrt.default(sum_dim_int_list_2)
    # forward
    slice_tensor_1: "float64[2]" = aten.slice.Tensor(random_0, 0, 2, 4)
    # backward
    systematic_rows_default_1: "(int64[3], float64[3], float64[])" = graphopt.systematic_rows.default(
        sqrt_default_3,
        slice_tensor_1,
        3,
    )
    getitem_2: "int64[3]" = operator.getitem(systematic_rows_default_1, 0)
    getitem_3: "float64[3]" = operator.getitem(systematic_rows_default_1, 1)
    index_select_default_2: "float32[3, 6]" = aten.index_select.default(mm_6, 0, getitem_2)
    _to_copy_default_3: "float32[3]" = aten._to_copy.default(getitem_3, dtype=torch.float32)
    view_default_2: "float32[3, 1]" = aten.view.default(_to_copy_default_3, [-1, 1])
    mul_tensor_6: "float32[3, 6]" = aten.mul.Tensor(index_select_default_2, view_default_2)
    t_8: "float32[3, 6]" = aten.t.default(t_6)
    index_select_default_3: "float32[3, 6]" = aten.index_select.default(relu_1, 0, getitem_2)
    detach_default: "float32[3, 6]" = aten.detach.default(index_select_default_3)
    detach_default_1: "float32[3, 6]" = aten.detach.default(detach_default)
    threshold_backward: "float32[3, 6]" = aten.threshold_backward.default(mul_tensor_6, detach_default_1, 0)
    t_9: "float32[6, 3]" = aten.t.default(threshold_backward)
    index_select_default_4: "float32[3, 2]" = aten.index_select.default(mul_10, 0, getitem_2)
    mm_7: "float32[6, 2]" = aten.mm.default(t_9, index_select_default_4)
    t_10: "float32[2, 6]" = aten.t.default(mm_7)
    # forward
    t_11: "float32[6, 2]" = aten.t.default(t_3)
    # backward
    mm_8: "float32[3, 2]" = aten.mm.default(threshold_backward, t_11)
    t_12: "float32[6, 2]" = aten.t.default(t_10)
    mul_27: "float32[3, 2]" = aten.mul.Tensor(mm_8, 2.0)
    t_13: "float32[2, 3]" = aten.t.default(mul_27)
    index_select_default_5: "float32[3, 4]" = aten.index_select.default(relu, 0, getitem_2)
    mm_9: "float32[2, 4]" = aten.mm.default(t_13, index_select_default_5)
    t_14: "float32[4, 2]" = aten.t.default(mm_9)
    t_16: "float32[2, 4]" = aten.t.default(t_14)
    t_17: "float32[6, 3]" = aten.t.default(threshold_backward)
    t_default_2: "float32[4, 3]" = aten.t.default(index_select_default_5)
    clone_default: "float32[6, 3]" = aten.clone.default(t_17, memory_format=torch.contiguous_format)
    clone_default_1: "float32[4, 3]" = aten.clone.default(t_default_2, memory_format=torch.contiguous_format)
    combine_rows_default: "float32[2, 3]" = graphopt.combine_rows.default(
        clone_default,
        given_left_rows_of_weight,
        given_left_values_of_weight,
    )
    combine_rows_default_1: "float32[2, 3]" = graphopt.combine_rows.default(
        clone_default_1,
        given_right_rows_of_weight,
        given_right_values_of_weight,
    )
    t_default_3: "float32[3, 2]" = aten.t.default(combine_rows_default_1)
    mm_default: "float32[2, 2]" = aten.mm.default(combine_rows_default, t_default_3)
    return (
        sum_1,  # output 0
        mm_default,  # gradient of compressed weight
        t_16,  # gradient of parameter down
        t_12,  # gradient of parameter up
        None,  # gradient of parameter below.weight
        t_8,  # gradient of parameter above.weight
        None,
    )
""",
        )
