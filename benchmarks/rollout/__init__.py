"""Measures rollouts; see __main__.py."""
