"""Packs the code that workers run: this checkout as it is, without what git ignores."""

import subprocess
import tarfile
from pathlib import Path

from tpu_grpo.records.errors import ConfigError

ARCHIVE, FILE_LIST = "code.tar.gz", "files.new"


def pack(checkout: Path, into: Path) -> str:
    """Write the archive and the list of its files into a directory, and return the ``revision``.

    Raises:
        ConfigError: the directory is no git work tree.
    """
    names = _git(checkout, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    present = sorted({name for name in names if name and (checkout / name).is_file()})
    with tarfile.open(into / ARCHIVE, "w:gz") as archive:
        for name in present:
            archive.add(checkout / name, name, recursive=False)
    with open(into / FILE_LIST, "w", encoding="utf-8") as listing:
        listing.write("".join(f"{name}\0" for name in present))
    return revision(checkout)


def revision(checkout: Path) -> str:
    """Name the commit, and how many files differ from it: ``6af09c4 and 2 changed files``."""
    commit = _git(checkout, "rev-parse", "--short", "HEAD").strip()
    changed = len(_git(checkout, "status", "--porcelain", "--untracked-files=all").splitlines())
    return commit + (f" and {changed} changed file{'s' if changed > 1 else ''}" if changed else "")


def _git(checkout: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(checkout), *words], capture_output=True, text=True, encoding="utf-8")
    if done.returncode:
        raise ConfigError(
            f"--code must be a git work tree with a commit, got {checkout} ({done.stderr.strip()}); "
            "clone the repository"
        )
    return done.stdout
