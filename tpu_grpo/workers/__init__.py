"""Processes that run users' code: rewards and environments have theirs through this room.

process.py      a process as the main process sees it: started without the accelerator, ended with all it started
inside.py       what such a process does first: it ends with the main process, and its memory is limited
open_files.py   how many files it may have open
sandbox.py      a model's programs in a process of their own with limits; sandbox_child.py is that process's program
channel.py      messages with a process that the main process never waits for
"""
