"""What a path of the config names: a file, the files of a pattern, or an address on the network.

data/*.jsonl             every file that fits, sorted by name
train.jsonl.gz           a compressed file
https://..., gs://...    read through fsspec, once, when the run starts
"""

import glob
import lzma
import os
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tpu_grpo.data.reading import reading
from tpu_grpo.records.errors import ConfigError, DataError, disk_error

PACKED = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz"}
"""A file whose name ends so is unpacked as it is read; fsspec calls it so."""
EXTRAS = {"gs": "gcsfs", "gcs": "gcsfs", "s3": "s3fs", "s3a": "s3fs", "abfs": "adlfs", "az": "adlfs"}
"""These packages bring fsspec what a kind of address needs."""
BLOCK = 2**20


@dataclass(frozen=True)
class Location:
    """One file, here or on the network."""

    name: str
    setting: str

    @property
    def is_remote(self) -> bool:
        """Say whether it is an address."""
        return is_address(self.name)

    @property
    def path(self) -> Path:
        """Return the path of a file that is here."""
        return Path(self.name).expanduser()

    @property
    def suffix(self) -> str:
        """Return what says how the file is read: .jsonl of train.jsonl.gz."""
        return os.path.splitext(self._without_query.removesuffix(self.packed))[1]

    @property
    def packed(self) -> str:
        """Return the suffix of the compression, or an empty text."""
        return next((suffix for suffix in PACKED if self._without_query.endswith(suffix)), "")

    @property
    def _without_query(self) -> str:
        return self.name.partition("?")[0] if self.is_remote else self.name

    def open(self) -> IO[bytes]:
        """Open the content, unpacked, as a file that is here: the file itself, or a temporary copy.

        Raises:
            FileNotFoundError: there is no such file.
            ConfigError: for an address that needs a package which is not installed.
            DataError: for an address that does not answer, and for what cannot be unpacked.
        """
        if not self.is_remote and not self.packed:
            return self.path.open("rb")
        copy = tempfile.TemporaryFile(prefix="tpu_grpo_data_")  # noqa: SIM115  # lives as long as the records
        with _explained(self):
            self._copy_to(copy)
        copy.flush()
        copy.seek(0)
        return copy

    def _copy_to(self, target: IO[bytes]) -> None:
        import fsspec

        name = self.name if self.is_remote else str(self.path)
        with fsspec.open(name, "rb", compression=PACKED.get(self.packed)) as opened:
            source: Any = opened
            size = 0 if self.packed else getattr(source, "size", None) or 0
            with reading(f"fetching {self.name}", size, "bytes") as advance:
                while block := source.read(BLOCK):
                    target.write(block)
                    advance(target.tell())


def is_address(name: str) -> bool:
    """Say whether a path is an address for fsspec, such as gs://bucket/train.jsonl."""
    return "://" in name


def expand(name: str, setting: str) -> list[Location]:
    """List the files that a path names, those of a pattern sorted.

    Raises:
        DataError: for a pattern that no file fits.
    """
    if not any(sign in name for sign in "*?[") or (not is_address(name) and Path(name).expanduser().exists()):
        return [Location(name, setting)]
    if is_address(name):
        if name.startswith(("http://", "https://")):
            return [Location(name, setting)]  # a question mark begins a query there
        found = _remote_matches(Location(name, setting))
    else:
        found = sorted(glob.glob(str(Path(name).expanduser()), recursive=True))
    files = [Location(each, setting) for each in found]
    if not files:
        raise DataError(f"{setting}: no file fits the pattern {name} (relative to {Path.cwd()}); correct it")
    return files


def _remote_matches(pattern: Location) -> list[str]:
    import fsspec

    with _explained(pattern):
        system, path = fsspec.core.url_to_fs(pattern.name)
        return sorted(system.unstrip_protocol(found) for found in system.glob(path))


@contextmanager
def _explained(location: Location) -> Iterator[None]:
    """Raise errors of fsspec, of its file systems and of unpacking as what users can act on."""
    scheme = location.name.partition("://")[0]
    try:
        yield
    except FileNotFoundError:
        raise
    except ImportError as error:
        package = EXTRAS.get(scheme, "the package that it names")
        own = "; `uv sync --extra gcs` installs what is tested" * (package == "gcsfs")
        raise ConfigError(
            f"{location.setting}: {location.name} needs a package that is not installed ({error}); install {package}"
            f"{own}"
        ) from error
    except Exception as error:
        if not location.is_remote and not isinstance(error, (OSError, EOFError, zlib.error, lzma.LZMAError)):
            raise
        if isinstance(error, OSError) and disk_error(error) is not None and not location.is_remote:
            raise
        remedy = "see that it can be reached from here" if location.is_remote else "copy or pack it again"
        raise DataError(
            f"{location.setting}: {location.name} must be readable, got {type(error).__name__}: {error}; {remedy}"
        ) from error
