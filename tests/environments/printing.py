"""Environments that print."""

import os
import signal
import sys

from tpu_grpo.workers.process import WORKER_MARK

if WORKER_MARK in os.environ:
    print("imported", end=" ")


class Printing:
    """Prints what it does."""

    def reset(self) -> None:
        print("begun")

    def say(self, text: str) -> str:
        """Say something, aloud and aside.

        Args:
            text: What is said.
        """
        return said(text)

    def die(self) -> None:
        """Die without another word."""
        print("dying")
        os.kill(os.getpid(), signal.SIGKILL)

    def get_reward(self) -> float:
        return 1.0


class PrintingAsync:
    """Does so on an event loop."""

    async def reset(self) -> None:
        print("begun")

    async def say(self, text: str) -> str:
        """Say something, aloud and aside.

        Args:
            text: What is said.
        """
        return said(text)

    async def get_reward(self) -> float:
        return 1.0


def said(text: str) -> str:
    for _ in range(1000):
        print(text)
        print(text, file=sys.stderr)
    return "said"
