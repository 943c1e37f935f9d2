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


def setup(app):
    """Adds ``config-fields``: a table of a config's settings, read off the constructor when the page is built."""
    from docutils import nodes
    from docutils.parsers.rst import Directive
    from docutils.statemachine import StringList

    class ConfigFields(Directive):
        required_arguments = 1
        optional_arguments = 1

        def run(self):
            from torchrl_ext.configs import hydra, update

            made = {"scheme": hydra.scheme_parameters, "updater": hydra.updater_parameters, "update": update.options}
            what, *name = self.arguments
            rows = ["| setting | type | default | |", "|---|---|---|---|"]
            for field in made[what](*name):
                default = "required" if field.required else f"`{field.default!r}`"
                cells = (f"`{field.name}`", f"`{field.type_name}`", default, field.help)
                rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
            table = nodes.container()
            self.state.nested_parse(StringList(rows), 0, table)
            return table.children

    app.add_directive("config-fields", ConfigFields)
