"""Memory: what a run needs, and what there is."""
