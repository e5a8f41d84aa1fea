"""Helpers that every room uses, one file per topic; this room imports no other.

Whole files and locks (`files`, `file_lock`), checkpoints (`checkpoint_files`), checks of settings (`checks`, `needs`,
`settings_record`), seeds (`seeding`), output of commands (`console`, `results`, `words`), helpers for torch (`torch_parts`),
private names of other packages (`pokes`), and lazy exports (`lazy`).
"""

from fedlight.support.lazy import room_names

__getattr__ = room_names(__name__)
