"""The command line, a file per command, whose ``main`` parses, calls, prints and returns an exit code; see main.py."""
