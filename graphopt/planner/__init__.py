"""Decisions: importance, selection, and the plan that the passes carry out."""
