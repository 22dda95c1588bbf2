"""What processes of tests leave out, as it takes time and shows nothing. It is imported first."""

# ruff: noqa: E402 (nothing is imported while the collector is on)

import gc
import traceback
from types import SimpleNamespace
from typing import Any

gc.disable()  # until all is imported; looking through modules for cycles took a tenth of the time

import accelerate.utils.memory
import torch._dynamo.convert_frame
import torch._dynamo.guards
import torch._dynamo.side_effects
import torch._dynamo.symbolic_convert
import torch._dynamo.utils
import torch._functorch._aot_autograd.graph_compile
import torch._subclasses.fake_tensor
import torch.mtia
import torch.xpu


def _logged(self: object, code_options: object, reason: str, exc: Any) -> None:
    exc.logged = True


# Texts and figures for logs that nothing turns on: a tenth of the time.
torch._dynamo.utils.record_compilation_metrics = lambda *_: None
torch._dynamo.symbolic_convert.InstructionTranslatorBase.log_graph_break = _logged
torch._dynamo.side_effects.SideEffects._format_side_effect_message = lambda *_: ""
torch._dynamo.guards.get_verbose_code_part = lambda code, guard: code
torch._dynamo.convert_frame.CapturedTraceback = SimpleNamespace(extract=lambda **_: SimpleNamespace(format=list, summary=list))
torch._functorch._aot_autograd.graph_compile._log_joint_graph = lambda *_: None
torch._functorch._aot_autograd.graph_compile._log_fw_bw_graphs = lambda *_: (None, None)
torch._subclasses.fake_tensor.traceback = SimpleNamespace(extract_stack=list, format_list=traceback.format_list)
for device in (torch.cuda, torch.mtia, torch.xpu):
    device.traceback = SimpleNamespace(format_stack=list)  # of each `torch.manual_seed`

torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0  # flushes the processor's caches, 20 ms for each compiled frame
accelerate.utils.memory.gc = SimpleNamespace(collect=lambda: 0)  # twice for each run of a Trainer, through all that tests share


def all_imported() -> None:
    """Modules are not looked through, and graphs, of which there is always a lot, rarely: most go without a collection."""
    gc.freeze()
    gc.set_threshold(300_000, 20, 20)
    gc.enable()
