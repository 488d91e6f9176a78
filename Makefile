# What people type. `make` alone lists it.
.PHONY: help setup demo test lint slices hosts

help:
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

setup:  ## install Python packages into .venv
	uv sync

demo:  ## watch a small model learn on this machine's CPU, a few minutes
	uv run scripts/run.py

test:  ## the default tests
	uv run pytest

lint:  ## style, format and types
	uv run ruff check
	uv run ruff format --check
	uv run pyrefly check

slices:  ## compile programs for TPU slices; no TPU needed
	uv run pytest -m slices

hosts:  ## whole runs of several processes
	uv run pytest -n 0 -m several_hosts
