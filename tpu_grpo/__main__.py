"""``python -m tpu_grpo COMMAND ...``."""

import sys

from tpu_grpo.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
