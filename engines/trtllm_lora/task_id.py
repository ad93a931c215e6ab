"""digest -> `lora_task_id`.

A task id stands for one content for ever: the engine ignores new weights under a known id, keys KV reuse by it,
and reads prefetch folder names as int32. So ids lie in 1 ... 2^31-1 (0 means "base model" to stock clients) and come
from the digest; two digests that would share an id are for the registry to see and refuse.
"""

from __future__ import annotations

MAX_TASK_ID = 2**31 - 1


def task_id_for(digest: str, probe: int = 0) -> int:
    """Task id of a bundle digest (hex sha256); `probe` > 0 gives the next candidates after a collision.

    The candidates are consecutive 31-bit windows of the digest, so they are the same on every machine.
    """
    value = int(digest, 16) >> (31 * (probe % 8))
    return value % MAX_TASK_ID + 1


def is_task_id_of(digest: str, task_id: object) -> bool:
    """Whether an id is one that this digest may have (rule B6): never another content's by a changed label."""
    return isinstance(task_id, int) and task_id in {task_id_for(digest, probe) for probe in range(8)}
