"""Says what a run needs of a TPU slice, before it starts and without one: memory by stage, seconds by step."""
