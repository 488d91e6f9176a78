"""Moving parameters from the trainer's layout to the sampler's, in memory.

names.py   which trainer leaf becomes which sampler leaf, and how
sync.py    the plan of a sync and the compiled function that carries it out
"""
