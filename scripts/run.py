"""Train: python scripts/run.py [CONFIG.yaml] [section.key=value ...]

Without a config it runs configs/demo_cpu.yaml. --help shows the settings, --print-config shows the resolved config,
--dry-run checks everything that can be checked without generating a token.
"""

import signal

import beside

signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})  # until the command handles them

if __name__ == "__main__":
    beside.run("train")
