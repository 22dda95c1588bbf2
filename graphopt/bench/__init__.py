"""Side-by-side measurements: `graphopt bench ...`."""
