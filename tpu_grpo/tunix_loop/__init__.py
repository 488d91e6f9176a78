"""Tunix's own GRPO learner, under everything else of a run, and this package's engine in scripts that use Tunix."""
