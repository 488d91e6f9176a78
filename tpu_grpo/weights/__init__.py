"""Moving parameters from the trainer's layout to the sampler's, in memory.

sync.py    the plan of a sync and the compiled function that carries it out; the rules are each family's
"""
