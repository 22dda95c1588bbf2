"""What passes are held to. Map: `contracts` (a pass against eager autograd), `compare` (values that should be equal)."""

from graphopt.testing.contracts import PassCheck, check_pass, check_passes, compiled

__all__ = ["PassCheck", "check_pass", "check_passes", "compiled"]
