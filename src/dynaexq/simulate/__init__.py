"""Runs in virtual time: recorded router traffic over the engine's own policy, residency and transitions."""
