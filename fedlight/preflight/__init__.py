"""Checks of ``fedlight run NAME --dry-run``, made before any download or training.

`dry_run` makes all of them; each returns findings (`finding`). Stages are parsed without loading anything (`stages`),
classes of the config name their needs themselves (`fedlight.support.needs`), and the hub is asked for small metadata alone
(`hub`).
"""
