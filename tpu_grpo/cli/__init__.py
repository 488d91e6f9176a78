"""The command line: one file per command; its ``main`` parses, calls, prints and returns an exit code. See main.py."""
