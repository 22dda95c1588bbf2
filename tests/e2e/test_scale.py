"""Analysis of a model with the layers of one of 7 billion parameters, whose weights exist nowhere, stays small."""

import json
import subprocess
import sys

import pytest

from tests.long_forms import long

PROGRAM = """
import json, resource, torch, graphopt
from transformers import LlamaConfig, LlamaForCausalLM
with torch.device("meta"):
    model = LlamaForCausalLM(LlamaConfig(dtype="bfloat16", num_hidden_layers=LAYERS))
ids = torch.zeros((4, 512), dtype=torch.long)
analysis = graphopt.analyze(model, {"input_ids": ids, "labels": ids}, backend="aot_eager")
flops, memory = analysis.flops, analysis.memory
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"step": flops.step, "rows": len(flops.tensors), "peak": peak,
                  "static": memory.static_bytes, "memory": memory.peak_bytes, "double": memory.at(8).peak_bytes}))
"""


@pytest.mark.parametrize("layers", [3, *long(6, 32)])  # three have 0.9 billion parameters: 1.7 GB, if they existed
def test_llama_7b_is_analysed_in_under_2_gb(layers: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("LAYERS", str(layers))], capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["peak"] < 2e9
    assert found["rows"] == 9 * layers + 3
    # Six multiply-adds' worth per weight and token but for the embedding, and attention on top.
    weights = layers * (4 * 4096 * 4096 + 3 * 4096 * 11008) + 32000 * 4096
    # Parameters and two AdamW states, and a step count per tensor; the embedding is 32000 x 4096.
    parameters = weights + 32000 * 4096 + (2 * layers + 1) * 4096
    assert 12 * parameters <= found["static"] <= 12 * parameters + 10**6
    assert found["static"] < found["memory"] < found["double"]
    attention = layers * 4 * 512 * 512 * 4096 * (4 + 10)
    assert found["step"] == 6 * 4 * 512 * weights + attention
