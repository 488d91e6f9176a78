"""Look at data: python scripts/data.py [CONFIG.yaml] [--preview 5] [--step 1] [--evaluation] [section.key=value ...]

Shows how many prompts a config has, how long they are, and the first ones as the model will see them.
"""

import beside

if __name__ == "__main__":
    beside.run("data")
