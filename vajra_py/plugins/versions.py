"""Names and versions of installed packages."""

from __future__ import annotations

from importlib import metadata


def name_and_version(distribution: metadata.Distribution) -> tuple[str, str]:
    """Return a package's name and version.

    They are in the first lines of its metadata; the standard library parses it all as an e-mail, with the description in it.
    """
    text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
    head = text.partition("\n\n")[0]
    fields = dict(line.split(": ", 1) for line in head.splitlines() if line.startswith(("Name: ", "Version: ")))
    if len(fields) < 2:
        return distribution.name, distribution.version
    return fields["Name"], fields["Version"]
