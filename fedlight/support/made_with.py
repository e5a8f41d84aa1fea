"""Settings with which the content of a folder was made, kept in a file there and compared before more work is done.

A stage of a recipe and ``fedlight fit`` write the file before their first work. Local files that the settings name are kept
by a digest of their content (`fedlight.support.contents`).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedlight.support.contents import Contents, changed, contents_of
from fedlight.support.files import read_json, sealed, write_json
from fedlight.support.settings_record import Difference, differences

CONTENTS = "contents of files"
EARLIER = "earlier files"
MISSING = "nothing"
MOST_NAMED = 5


class MadeWith:
    """The settings of a folder, and the file that keeps them.

    Args:
        file: JSON file in the folder.
        settings: plain values, compared one by one.
        named: settings in which local files may be named.
        run: folder of the whole run; its finished stages describe their files themselves.
        remedy: what to do with a damaged file.
    """

    def __init__(
        self, file: Path, settings: dict[str, Any], named: dict[str, Any], run: Path, remedy: str
    ) -> None:
        self.file, self.settings = file, settings
        self._named, self._run, self._remedy = named, run, remedy

    def write(self, earlier: dict[str, str] | None = None) -> None:
        """Write the settings, the digests of the files that they name, and those of ``earlier`` files in the folder."""
        contents = contents_of(self._named, self.file.parent, self._run)
        others = {} if earlier is None else {EARLIER: earlier}
        write_json(self.file, sealed({**self.settings, CONTENTS: contents, **others}))

    def earlier(self) -> dict[str, str]:
        """Return the digests of files that were made with other settings, by their paths."""
        found: dict[str, str] = read_json(self.file, self._remedy).get(EARLIER, {})
        return found

    def differences(self) -> list[Difference]:
        """Return the settings that differ from those in the file; raise ValueError if it is damaged."""
        saved = read_json(self.file, self._remedy)
        names = dict.fromkeys(key for key in {**saved, **self.settings} if key not in (CONTENTS, EARLIER))
        was, now = ({key: side.get(key, MISSING) for key in names} for side in (saved, self.settings))
        return differences(was, now)

    def refuse_changed_files(self, everything: bool, remedy: str) -> None:
        """Raise ValueError for a named file with another content; ``everything``: also where size and time are unchanged."""
        contents: Contents = read_json(self.file, self._remedy).get(CONTENTS, {})
        if (name := changed(contents, everything)) is not None:
            raise ValueError(
                f"{self.file.parent} was made with another content of {name}, which has changed since: put the old one "
                f"back, {remedy}"
            )


def in_words(found: Sequence[Difference]) -> str:
    """Return differences in one line, each as ``key: old -> new``.

    Examples:
        >>> in_words([("model.lr", 0.1, 0.2), ("data.limit", None, 3)])
        'model.lr: 0.1 -> 0.2; data.limit: None -> 3'
    """
    named = "; ".join(f"{name}: {was} -> {now}" for name, was, now in found[:MOST_NAMED])
    return named + (f"; and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else "")
