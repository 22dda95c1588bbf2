"""Running an optimised model: the module, its compiled captures, and controllers."""
