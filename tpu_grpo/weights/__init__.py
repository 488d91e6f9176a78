"""Moving parameters from the trainer's layout to the sampler's, in memory.

plan.py        which leaf becomes which, and in which groups; the rules are each family's
transport.py   one group: a compiled program, on the same devices or between disjoint ones
sync.py        all groups, one after the other, within a bound of memory
copies.py      that every copy of a parameter is the same
"""
