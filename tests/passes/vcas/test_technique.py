"""What the sampler refuses."""

from __future__ import annotations

import pytest
from graphopt.passes import Vcas, run_pass

import graphopt
from graphopt import PassError
from graphopt.capture import capture
from tests import zoo


def test_bad_ratios_are_refused() -> None:
    for wrong in (0.0, 1.5, -1.0, "half", float("nan")):
        with pytest.raises(PassError, match="keep_rows"):
            Vcas(keep_rows=wrong)  # type: ignore[arg-type]
        with pytest.raises(PassError, match="keep_tokens"):
            Vcas(keep_tokens=wrong)  # type: ignore[arg-type]
    with pytest.raises(PassError, match="must not increase"):
        Vcas(keep_rows=(0.5, 0.7))
    with pytest.raises(PassError, match="every"):
        Vcas(every=0)
    with pytest.raises(PassError, match="alpha"):
        Vcas(alpha=2.0)
    with pytest.raises(PassError, match="batches=1 must be a whole number of at least 2"):
        Vcas(batches=1)
    with pytest.raises(PassError, match=r"rows_share=1\.5 must be a number from 0 to 1"):
        Vcas(rows_share=1.5)
    model, inputs = zoo.make("mlp", 6)
    with pytest.raises(PassError, match="2 ratios for 3 boundaries"):
        graphopt.optimize(model, inputs, passes=[Vcas(keep_rows=(0.9, 0.5))], backend="aot_eager")
    with pytest.raises(PassError, match="nowhere"):
        graphopt.optimize(model, inputs, passes=[Vcas(keep_tokens={"nowhere.weight": 0.5})], backend="aot_eager")
    with pytest.raises(PassError, match="nothing to sample"):
        run_pass(Vcas(), capture(model, inputs), {"rows: elsewhere": 0.5})
