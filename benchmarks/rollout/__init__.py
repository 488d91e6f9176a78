"""What rollouts cost; see __main__.py."""
