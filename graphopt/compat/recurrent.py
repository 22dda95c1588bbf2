"""Recurrent layers: compiled step by step, or left to eager mode, as torch.compile leaves all of them."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import SymInt, Tensor
from torch._decomp import decompositions
from torch._dynamo import exc, symbolic_convert
from torch.nn.modules import rnn

from graphopt.compat.replaced import Replaced

logger = logging.getLogger(__name__)

LONG = 20
"""Steps of a layer, of all its layers and directions, that take most of a minute to compile."""

MANY_STEPS = 100
"""Those that take minutes, and longer than in eager mode."""

REASON = "a recurrent layer of many steps, or of a length that varies, is left to eager mode"

_stacked = decompositions._rnn_helper


@contextlib.contextmanager
def open_recurrent_layers() -> Iterator[None]:
    """Have recurrent layers traced as their products, with the dropout between them.

    Where the input of an LSTM on the CPU needs no gradient, torch would take oneDNN's layer instead, whose backward then lacks
    its workspace. And torch's own decomposition leaves out the dropout between layers (it asks `num_layers < i - 1`).
    """

    def layer_by_layer(
        input: Tensor, hidden: Any, params: Any, has_biases: bool, num_layers: int, dropout: float, train: bool,
        bidirectional: bool, batch_first: bool, layer_fn: Any,
    ) -> tuple[Tensor, list[Any]]:  # fmt: skip
        input = input.transpose(0, 1) if batch_first else input
        directions = 2 if bidirectional else 1
        if input.dim() == 3 and input.shape[0] * num_layers * directions >= MANY_STEPS:  # packed sequences have two
            warn_of_many_steps(int(input.shape[0]) * num_layers * directions)
        final: list[Any] = []
        for i in range(num_layers):
            own = slice(i * directions, (i + 1) * directions)
            input, states = _stacked(input, hidden[own], params[own], has_biases, 1, 0.0, train, bidirectional, False, layer_fn)
            final.extend(states)
            if dropout and train and i < num_layers - 1:
                input = torch.dropout(input, dropout, True)
        return (input.transpose(0, 1) if batch_first else input), final

    with (
        mock.patch.object(decompositions, "select_one_layer_lstm_function", return_value=decompositions.one_layer_lstm),
        mock.patch.object(decompositions, "_rnn_helper", layer_by_layer),
    ):
        yield


@functools.cache
def warn_of_many_steps(steps: int) -> None:
    """Warn, once for each number of them, before minutes pass in silence."""
    logger.warning(
        "a recurrent layer is compiled step by step, %d times its cell: that takes minutes, and steps can take longer than eager "
        "mode's. layer.forward = types.MethodType(torch.compiler.disable(type(layer).forward), layer) leaves it to eager mode, "
        "where all of it is trained",
        steps,
    )


def left_to_eager_mode(long: bool) -> contextlib.AbstractContextManager[Any]:
    """While this is entered, Dynamo breaks graphs at recurrent layers that are not worth compiling.

    A compiled layer has one length, and each further one would be compiled anew: so it is left where Dynamo traces its length as
    a symbol, unless all has to be one graph.

    Args:
        long: those of `LONG` steps are, too.
    """

    def checked(
        input: Tensor, hidden: Any, params: Any, has_biases: bool, num_layers: int, dropout: float, train: bool,
        bidirectional: bool, batch_first: bool, layer_fn: Any,
    ) -> tuple[Tensor, list[Any]]:  # fmt: skip
        translator = getattr(symbolic_convert.tls, "current_tx", None)
        if input.dim() == 3 and translator is not None:  # packed sequences have two
            length = input.shape[1 if batch_first else 0]
            varies = isinstance(length, SymInt) and not translator.one_graph
            left = translator.output.root_tx.f_code.co_filename == rnn.__file__  # the graph of its caller ends before it
            if left or varies or (long and length * num_layers * (2 if bidirectional else 1) >= LONG):
                exc.unimplemented(
                    gb_type=REASON,
                    context=f"{length} steps",
                    explanation="Compiled, it would be its cell for each step.",
                    hints=[],
                )
        return _stacked(input, hidden, params, has_biases, num_layers, dropout, train, bidirectional, batch_first, layer_fn)

    return Replaced(decompositions, "_rnn_helper", checked)
