"""The weight sync: it moves parameters from the trainer's layout to the sampler's, in memory."""
