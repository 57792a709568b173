"""The files of a repository while a policy works on them: listing, reading, editing, and what has changed.

In memory only: nothing here touches a disk or runs anything. What a policy gets wrong is answered with a line to read.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import PurePosixPath

from sao_core.environments.tools import shortened

_MOST_FILES = 200
_LARGEST = 100_000
_LARGEST_ALL = 2_000_000
"""Characters of one file, and of all; a sandbox has room for that."""
_START_UP = {"conftest.py", "sitecustomize.py", "usercustomize.py", "pytest.ini", "tox.ini"}
"""Files that Python or a test runner would read by themselves."""


class Refused(ValueError):
    """An edit that cannot be made; the message is written for the model to read."""


def is_test_file(path: str) -> bool:
    """Whether a file has to do with running tests rather than with what is tested."""
    parts = PurePosixPath(path).parts
    name = parts[-1]
    return (
        bool({"tests", "test"} & set(parts[:-1]))
        or name.startswith("test_")
        or name.endswith("_test.py")
        or name in _START_UP
    )


def without_tests(files: Mapping[str, str], keep: Mapping[str, str] | None = None) -> dict[str, str]:
    """The files that a repair consists of; ``keep`` are files that are taken from there, test files included."""
    original = {path: text for path, text in (keep or {}).items() if is_test_file(path)}
    return {path: text for path, text in files.items() if not is_test_file(path)} | original


class Workspace:
    """Files by path, as they were given and as they are now."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self._given = dict(files)
        self.files = dict(files)

    @property
    def changes(self) -> dict[str, str | None]:
        """Path → text now, for files that differ from what was given; None for deleted ones."""
        paths = sorted(self._given.keys() | self.files.keys())
        return {p: self.files.get(p) for p in paths if self.files.get(p) != self._given.get(p)}

    def apply(self, changes: Mapping[str, str | None]) -> None:
        """Make :attr:`changes` of another workspace of the same repository here."""
        for path, text in changes.items():
            if text is None:
                self.files.pop(path, None)
            else:
                self.files[path] = text

    def listing(self) -> str:
        """All paths with their numbers of lines."""
        if not self.files:
            return "there are no files"
        return "\n".join(f"{path} ({len(text.splitlines())} lines)" for path, text in sorted(self.files.items()))

    def read(self, path: str, limit: int) -> str:
        """The text of a file, its middle left out if it is longer than ``limit``. Raises :class:`Refused`."""
        text = self._existing(path)
        return shortened(text, limit) if text else "the file is empty"

    def replace(self, path: str, old: str, new: str) -> None:
        """Replace a text that must occur exactly once. Raises :class:`Refused`."""
        text = self._existing(path)
        count = text.count(old) if old else 0
        if not old:
            raise Refused("`old` must not be empty")
        if count != 1:
            found = "is not there" if count == 0 else f"is there {count} times"
            raise Refused(f"`old` must occur exactly once in {path}, and it {found}")
        self._put(path, text.replace(old, new))

    def write(self, path: str, text: str) -> None:
        """Write a file, whether or not it exists. Raises :class:`Refused`."""
        check_path(path)
        for other in self.files:
            if other != path and (other.startswith(f"{path}/") or path.startswith(f"{other}/")):
                raise Refused(f"{path} cannot be both a file and a folder: there is {other}")
        self._put(path, text)

    def delete(self, path: str) -> None:
        """Delete a file. Raises :class:`Refused`."""
        self._existing(path)
        del self.files[path]

    def patch(self) -> str:
        """All changes as a unified diff in git's form, that `git apply` and `patch -p1` take; empty without any."""
        return "".join(_diff(path, self._given.get(path), text) for path, text in self.changes.items())

    def _existing(self, path: str) -> str:
        if path not in self.files:
            raise Refused(f"there is no file {path!r:.100}; list_files shows those that there are")
        return self.files[path]

    def _put(self, path: str, text: str) -> None:
        if len(text) > _LARGEST:
            raise Refused(f"a file may have {_LARGEST} characters: got {len(text)}")
        if "\0" in text:
            raise Refused("a file must be text, without NUL characters")
        if path not in self.files and len(self.files) >= _MOST_FILES:
            raise Refused(f"there may be {_MOST_FILES} files")
        if len(text) + sum(len(other) for name, other in self.files.items() if name != path) > _LARGEST_ALL:
            raise Refused(f"all files together may have {_LARGEST_ALL} characters")
        self.files[path] = text


def check_path(path: str) -> None:
    """Raise :class:`Refused` for a path that is not plainly one of a file below the repository's root."""
    parts = path.split("/")
    if len(path.encode()) > 200 or not path.isprintable() or any(part in ("", ".", "..") for part in parts):
        raise Refused(f"a path must be relative to the repository, such as folder/file.py: got {path!r:.100}")
    if "\\" in path or ":" in path or any(part.startswith(".git") for part in parts):
        raise Refused(f"a path must not hold \\ or :, nor lead into .git: got {path!r:.100}")


def _diff(path: str, before: str | None, after: str | None) -> str:
    old, new = _lines(before), _lines(after)
    head = [f"diff --git a/{path} b/{path}\n"]
    if before is None:
        head.append("new file mode 100644\n")
    if after is None:
        head.append("deleted file mode 100644\n")
    names = ("/dev/null" if before is None else f"a/{path}", "/dev/null" if after is None else f"b/{path}")
    lines = []
    for line in difflib.unified_diff(old, new, *names):
        lines.append(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n")
    return "".join([*head, *lines])


def _lines(text: str | None) -> list[str]:
    """Lines as git sees them, which end in a line feed and nothing else."""
    *ended, last = (text or "").split("\n")
    return [f"{line}\n" for line in ended] + ([last] if last else [])
