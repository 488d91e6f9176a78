"""Tunix's own GRPO learner inside a run of this package, and this package's engine inside scripts that use Tunix."""
