"""Try rewards: python scripts/rewards.py CONFIG.yaml --completions file.jsonl [section.key=value ...]

Scores the completions in a file with the rewards of a config, without a model. --help explains the file's format.
"""

import beside

if __name__ == "__main__":
    beside.run("rewards")
