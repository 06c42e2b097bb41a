"""Files are written whole or not at all, and nothing but files is replaced."""

import errno
import os
import re
import stat
from unittest import mock

import pytest

from llama_mini.checkpoint.files import replace


def test_a_file_is_there_when_it_is_whole(tmp_path):
    path = tmp_path / "out"
    path.write_text("before")

    def fail(file):
        file.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        replace(path, fail)
    assert [file.name for file in tmp_path.iterdir()] == ["out"]
    assert path.read_text() == "before"
    for error in (OSError(errno.ENOSPC, "No space left on device"), RuntimeError("No space left")):
        with pytest.raises(
            OSError, match=f"^{re.escape(str(path))} cannot be written: No space left"
        ):
            replace(path, mock.Mock(side_effect=error))
    assert path.read_text() == "before"
    replace(path, lambda file: file.write_text("after"))
    assert path.read_text() == "after"


def test_the_umask_decides_who_can_read_it(tmp_path):
    def private(file):
        file.touch(mode=0o600)

    before = os.umask(0o022)
    try:
        replace(tmp_path / "out", private)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o644


def test_a_link_stays_and_its_file_is_replaced(tmp_path):
    (tmp_path / "file").write_text("before")
    (tmp_path / "link").symlink_to("file")
    replace(tmp_path / "link", lambda file: file.write_text("after"))
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "after"


def test_a_pipe_or_a_folder_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(ValueError, match="not a file"):
            replace(path, lambda file: file.write_text("after"))
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
