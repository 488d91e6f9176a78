"""Play an environment: python scripts/environment.py CONFIG.yaml|RUN [--record 0] [--turns FILE] [--model]

You write what the policy would write, or let a model do it, and see tokens, masks and rewards as a run would have them.
"""

import beside

if __name__ == "__main__":
    beside.run("environment")
