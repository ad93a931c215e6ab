"""What /proc says of processes."""

from pathlib import Path


def parent_of(pid: int) -> int:
    """Parent of a process; 0 if it is gone."""
    try:
        return int((Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
