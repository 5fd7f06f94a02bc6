"""DynaExq: Mixture-of-Experts inference where the precision of each expert is a run-time resource."""

__version__ = "0.1.0"
