"""Files that a run writes again and again: never over something that is not its own."""

from __future__ import annotations

from pathlib import Path

from dynaexq.core import OptionError


def check_own_file(path: Path, option: str, kind: str, beginning: bytes) -> None:
    """Raise OptionError unless `path` can become a file of `kind`: absent, or a regular file, empty or begun as one."""
    try:
        if not path.resolve().parent.is_dir() or path.name in ("", ".", ".."):
            raise OptionError(f"{option} {str(path)!r}: not a file in an existing directory")
        if not path.exists():
            return
        if not path.is_file():
            raise OptionError(f"{option} {path}: it is there, and no regular file; name another")
        with path.open("rb") as file:
            found = file.read(len(beginning))
    except (OSError, RuntimeError) as error:  # names too long, unreadable files, loops of links
        raise OptionError(f"{option} {path}: {getattr(error, 'strerror', None) or error}") from error
    if found and found != beginning:
        raise OptionError(f"{option} {path}: it is there, and was never a {kind}; name another file")
