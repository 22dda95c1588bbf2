"""Analyses: pure functions from a TrainingGraph to frozen results, with formulas in the batch size inside."""
