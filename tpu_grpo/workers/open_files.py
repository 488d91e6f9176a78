"""How many files a process may have open."""

import resource

_ENOUGH = 2**16


def allow_many_files() -> int:
    """Raise this process's limit on open files as far as it may and has use for, and return what it was."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, _ENOUGH)), hard))
    return soft


def allow_files(soft: int) -> None:
    """Set this process's limit on open files, up to what it may raise it to."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
