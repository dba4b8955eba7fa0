"""How Sphinx makes the site: ``make docs``."""

from __future__ import annotations

import inspect
import os
import sys
from pathlib import Path
from typing import Any

from sphinx.util.inspect import stringify_signature

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bindings")]

from loaderd.version import VERSION  # noqa: E402 - found by the line above

project = "loaderd"
release = version = VERSION
copyright = "the authors of loaderd"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx_argparse_cli",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]
# Most blocks that name no language are output.
highlight_language = "text"

# Of a session in a terminal, the button copies the commands, not their output.
copybutton_prompt_text = "$ "
copybutton_exclude = ".linenos, .gp, .go"
copybutton_selector = "div:not(.highlight-text) > div.highlight pre"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

# Defaults in the help of commands are the reader's folders, not those of who makes the site.
for name in ("XDG_RUNTIME_DIR", "XDG_STATE_HOME"):
    os.environ[name] = f"${name}"

# The bindings are read without what they bind.
autodoc_mock_imports = ["tensorflow", "keras", "torch", "jax", "ray"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 80
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = f"loaderd {VERSION}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_show_sphinx = False


def setup(app: Any) -> None:
    app.connect("autodoc-process-signature", signature_of_init)


def signature_of_init(
    app: Any,
    what: str,
    name: str,
    item: Any,
    options: Any,
    signature: str | None,
    returned: str | None,
) -> tuple[str, str | None] | None:
    """A class whose base is not there, but stands for one, has the signature of that: it is in ``__init__``.

    Exceptions have none: users catch them.
    """
    if what == "exception" and signature:
        return "", None
    if (
        what != "class"
        or signature is None
        or not signature.startswith("(*args")
    ):
        return None
    found = inspect.signature(item.__init__)
    without_self = list(found.parameters.values())[1:]
    return stringify_signature(
        found.replace(parameters=without_self), show_return_annotation=False
    ), returned
