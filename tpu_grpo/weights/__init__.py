"""The weight sync: it moves parameters from the trainer's layout to the sampler's, in memory.

plan.py          matches the trainer's leaves with the sampler's and groups them; each family has the rules
adapters.py      merges a LoRA adapter with its weight on the way
transport.py     compiles the program of one group, for the same devices or for disjoint ones
intermediate.py  chooses the sharding that a leaf passes through on its way to a replicated target
sync.py          runs all groups one after the other, within a bound of temporary memory
copies.py        checks that all copies of a replicated parameter are equal
"""
