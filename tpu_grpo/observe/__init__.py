"""What a run tells whoever watches it: metrics and where they are written, pages of one run and of several."""
