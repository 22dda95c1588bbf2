"""graphopt: a compiler that makes fine-tuning cheaper."""
