"""Models whose layers the user has divided among ranks by `parallelize_module`."""

from __future__ import annotations

import torch

from tests.distributed import work_tensor_parallel
from tests.distributed.spawned import results


def test_they_train_as_in_eager_mode_and_the_report_says_why() -> None:
    why = "the model is tensor parallel (up.weight is a DTensor), which is not planned"
    for found in results(work_tensor_parallel.work):
        for (loss, gradients), (wanted, others) in zip(found["steps"], found["eager"], strict=True):
            torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=0.0)
            assert sorted(gradients) == sorted(others)
            for name, gradient in gradients.items():
                torch.testing.assert_close(gradient, others[name], rtol=1e-10, atol=1e-13, msg=name)
        assert found["notes"] == [f"the model is trained as it is: {why}"]
        assert found["counted"] == f"NothingToPlan: {why}."
        assert f"there is none: {why}." in found["mesh, too"]
