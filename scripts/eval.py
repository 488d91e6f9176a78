"""Evaluate: python scripts/eval.py [CONFIG.yaml] --checkpoint best [section.key=value ...]

Evaluates a checkpoint of a run on held-out prompts, without training. --help says which checkpoints can be named.
"""

import beside

if __name__ == "__main__":
    beside.run("evaluate")
