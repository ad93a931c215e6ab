"""What /proc says of processes."""

from pathlib import Path


def parent_of(pid: int) -> int:
    """Parent of a process; 0 if it is gone."""
    try:
        return int((Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def tmpdir_of(pid: int) -> Path | None:
    """The TMPDIR a process was started with; None if it has none, or is gone."""
    try:
        words = (Path("/proc") / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return None
    return next((Path(word[7:].decode()) for word in words if word.startswith(b"TMPDIR=")), None)
