"""What pyproject.toml can't say: the description on an index page, whose readers have no folder to follow a link into.

Where the repository is on the web, whoever publishes says, as ``ZC_URL`` while building (``https://HOST/OWNER/NAME``):
links of the README then lead there, and the metadata name it. Without it a link is the path that it shows, of a file
of the sdist.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from setuptools import setup

_LINK = re.compile(r"\[([^\]\n]+)\]\((?!https?:|#)([^)\s]+)\)")


def description(text: str, url: str, version: str) -> str:
    """``text`` with its links into the repository absolute, or plain where nobody says where that is."""
    return _LINK.sub(rf"[\1]({url}/blob/v{version}/\2)" if url else r"\1", text)


def main() -> None:
    here = Path(__file__).parent
    url = os.environ.get("ZC_URL", "").rstrip("/")
    if url and not url.startswith("https://"):
        raise ValueError(f"ZC_URL is {url!r}, expected https://HOST/OWNER/NAME")
    found = re.search(r'__version__ = "([^"]+)"', (here / "zc" / "version.py").read_text(encoding="utf-8"))
    assert found is not None, "zc/version.py has no __version__"
    setup(
        long_description=description((here / "README.md").read_text(encoding="utf-8"), url, found[1]),
        long_description_content_type="text/markdown",
        project_urls={"Source": url, "Documentation": f"{url}/tree/v{found[1]}/docs"} if url else {},
    )


main()
