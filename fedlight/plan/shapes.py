"""Names of the public architectures that can be planned."""

from fedlight.conf import path as conf_path


def known_shapes() -> list[str]:
    """Return the names of the architectures in ``conf/shapes``, sorted."""
    return sorted(file.parent.name for file in conf_path("shapes").glob("*/config.json"))
