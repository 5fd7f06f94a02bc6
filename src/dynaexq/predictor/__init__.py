"""Predictors of routing that are trained: their files, their training, and what can be expected of them."""
