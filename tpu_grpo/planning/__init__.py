"""Predicts what a run needs on a TPU slice, without a TPU: the memory of each stage, and the seconds of a step."""
