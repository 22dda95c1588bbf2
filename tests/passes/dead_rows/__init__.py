"""Tests of `graphopt.passes.dead_rows`."""
