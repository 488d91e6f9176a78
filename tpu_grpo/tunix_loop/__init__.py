"""Tunix's own GRPO loop with this package's engine and loss; see examples/tunix_loop.py."""
