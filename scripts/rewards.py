"""Try rewards: python scripts/rewards.py CONFIG.yaml --completions file.jsonl [section.key=value ...]

Scores completions that are there already with the rewards of a config, without a model. --help explains the file.
"""

import sys

from tpu_grpo.cli.rewards import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
