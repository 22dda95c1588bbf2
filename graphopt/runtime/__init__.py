"""Running an optimised model: the module, its compiled variants, and controllers."""
