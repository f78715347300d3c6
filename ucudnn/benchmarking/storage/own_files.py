"""Folders for this user alone, and whether what lies in a folder can be changed by others."""

import os
import stat
from pathlib import Path


def make_private(folder: Path) -> None:
    """Make a folder for this user alone, and those above it that are not there."""
    for each in reversed((folder, *folder.parents)):
        each.mkdir(mode=0o700, exist_ok=True)


def distrust(path: Path, top: Path) -> str | None:
    """Return why a file or folder must not be trusted: who else may change it.

    Returns None if only root, this user, and the owner of this package may: their code runs here anyway.

    Args:
        path: the file or folder.
        top: the path itself, or the last folder above it that is looked at.

    Raises:
        OSError: if it cannot be looked at, for example because there is none.
    """
    trusted = os.geteuid(), 0, Path(__file__).stat().st_uid
    for each in (path, *path.parents):
        for found in (each.lstat(), each.stat()):
            if found.st_uid not in trusted:
                return f"{each} belongs to another user, of number {found.st_uid}"
            if not stat.S_ISLNK(found.st_mode) and _others_write(found):
                return f"{each} can be changed by other users: `chmod go-w {each}` ends that"
        if each == top:
            break
    return None


def _others_write(found: os.stat_result) -> bool:
    """Whether others may write a file, or replace files of this user in a folder, which a sticky one forbids."""
    if stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX:
        return False
    shared = found.st_mode & stat.S_IWGRP and not _is_private(found.st_gid, found.st_uid)
    return bool(shared or found.st_mode & stat.S_IWOTH)


def _is_private(group: int, user: int) -> bool:
    """Whether a group has one user alone, as that of each user on many systems, whose folders groups may write."""
    import grp
    import pwd

    try:
        name, members = pwd.getpwuid(user).pw_name, grp.getgrgid(group)
    except KeyError:
        return False
    return members.gr_name == name and not {*members.gr_mem} - {name}
