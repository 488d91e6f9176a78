"""Try rewards: python scripts/rewards.py CONFIG.yaml --completions file.jsonl [section.key=value ...]

Scores the completions in a file with the rewards of a config, without a model. --help explains the file's format.
"""

import sys

import beside

if __name__ == "__main__":
    beside.prepare()
    from tpu_grpo.cli.rewards import main

    sys.exit(main(sys.argv[1:]))
