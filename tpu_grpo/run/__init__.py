"""A run: opens its inputs, builds its parts, and drives them in a pipeline. One run at a time uses ``run.dir``."""
