"""Who else may change a file: what belongs to another user or can be written by others is not trusted."""

import os
import stat

import pytest

from tests.support.other_user import OTHER, needs_root
from ucudnn.benchmarking.storage.file_lock import distrust, make_private


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "cache" / "ucudnn" / "gate" / "library.so"
    make_private(path.parent)
    path.write_text("code")
    path.chmod(0o700)
    return path


def test_new_folders_are_for_their_user_alone_whatever_the_umask_is(tmp_path):
    (tmp_path / "a").mkdir(mode=0o755)
    before = os.umask(0)
    try:
        make_private(tmp_path / "a" / "b" / "c")
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / each).stat().st_mode) for each in ("a", "a/b", "a/b/c")]
    assert modes == [0o755, 0o700, 0o700]
    make_private(tmp_path / "a" / "b" / "c")
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        make_private(tmp_path / "file" / "b")


@pytest.mark.parametrize("level", range(4))
def test_what_others_can_change_is_named(file, level):
    top = file.parents[2]
    changed = (file, *file.parents)[level]
    assert distrust(file, top) is None
    changed.chmod(0o707)
    assert distrust(file, top) == f"{changed} can be changed by other users: `chmod go-w {changed}` ends that"
    assert distrust(file, file) == (None if level else distrust(file, top))
    changed.chmod(0o755)
    assert distrust(file, top) is None


@needs_root
@pytest.mark.parametrize("level", range(4))
def test_what_belongs_to_another_user_is_named(file, level):
    changed = (file, *file.parents)[level]
    os.chown(changed, OTHER, -1)
    assert distrust(file, file.parents[2]) == f"{changed} belongs to another user, of number {OTHER}"


@needs_root
def test_a_group_with_others_in_it_is_told_from_that_of_one_user(file):
    file.chmod(0o770)
    assert distrust(file, file) is None  # that of root alone, as other users have one, too
    os.chown(file, -1, OTHER)
    assert "can be changed by other users" in distrust(file, file)


def test_in_a_sticky_folder_others_cannot_replace_a_file(file):
    file.parents[2].chmod(0o1777)
    assert distrust(file, file.parents[2]) is None
    file.chmod(0o1707)
    assert "can be changed by other users" in distrust(file, file.parents[2])


@needs_root
def test_a_link_is_as_good_as_its_owner_and_what_it_names(file, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(file)
    assert distrust(link, link) is None
    for owner, target in ((OTHER, 0), (0, OTHER)):
        os.chown(link, owner, -1, follow_symlinks=False)
        os.chown(file, target, -1)
        assert distrust(link, link) == f"{link} belongs to another user, of number {OTHER}"


def test_what_is_not_there_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        distrust(tmp_path / "nothing", tmp_path)
