"""Sphinx settings."""

import re
from pathlib import Path

project = "torchrl_ext"
author = "The torchrl_ext authors"
copyright = "2026, the torchrl_ext authors"
release = re.search(
    r'__version__ = "([^"]+)"', (Path(__file__).parents[1] / "torchrl_ext" / "__init__.py").read_text()
)[1]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "torchrl_ext"
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence", "deflist"]
autodoc_typehints = "description"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": True}
default_role = "code"  # a single backtick in a docstring is code
napoleon_use_ivar = True
