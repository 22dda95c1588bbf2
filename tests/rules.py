"""Selection by the importance that one batch's gradients show, for tests of that rule and of selections that change."""

from graphopt.passes import GreenTrainer

MEASURED = [GreenTrainer(rule="greentrainer")]
