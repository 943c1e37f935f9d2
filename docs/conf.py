"""Sphinx settings."""

import dataclasses
import inspect
import re
import shutil
import sys
from pathlib import Path

project = "torchrl_ext"
author = "The torchrl_ext authors"
copyright = "2026, the torchrl_ext authors"
release = re.search(
    r'__version__ = "([^"]+)"', (Path(__file__).parents[1] / "torchrl_ext" / "__init__.py").read_text()
)[1]

NOTEBOOKS = Path(__file__).parent / "tutorials"  # a copy, which git ignores
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon"]
templates_path = ["_templates"]
nb_execution_mode = "off"  # notebooks keep the outputs that `python -m tests.notebooks` wrote
nb_merge_streams = True
nb_code_prompt_show = nb_code_prompt_hide = "Code of the plot"
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "torchrl_ext"
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence", "deflist"]
autodoc_typehints = "description"
autodoc_member_order = "bysource"
_NOT_OURS = (
    "Module,TensorDictModuleBase,WeightSyncScheme,WeightUpdaterBase,Transform,Struct,BaseException,tuple,str,Enum"
)
autodoc_default_options = {"members": True, "show-inheritance": True, "inherited-members": f"{_NOT_OURS},object"}
default_role = "code"  # a single backtick in a docstring is code
napoleon_use_ivar = True
smartquotes_action = "qe"  # two hyphens begin an option


def settings(what):
    """The fields of one table, and the classes that explain them."""
    from torchrl_ext.base.registry import transports
    from torchrl_ext.compat.flags.options import WeightUpdateConfig
    from torchrl_ext.rl import hydra
    from torchrl_ext.rl.scheme import TransportWeightSyncScheme

    moved = [transports.load(name) for name in sorted(transports.names())]
    owner, explain = {
        "update": (WeightUpdateConfig, [WeightUpdateConfig]),
        "scheme": (hydra.TransportWeightSyncSchemeConfig, [TransportWeightSyncScheme, *moved]),
    }[what]
    return [field for field in dataclasses.fields(owner) if not field.name.startswith("_")], explain


def explained(owners):
    """Parameter -> what the first class that explains it says of it, in its fields or its docstring, as one line."""
    texts = {}
    for owner in owners:
        if dataclasses.is_dataclass(owner):
            texts |= {field.name: field.metadata.get("help", "") for field in dataclasses.fields(owner)}
            continue
        block = re.search(r"^(?:Args|Attributes):\n((?: +.*\n?)+)", inspect.getdoc(owner), re.MULTILINE)
        for entry in re.split(r"\n(?= {4}\S)", block[1]):
            names, _, text = entry.partition(":")
            for name in names.split(","):
                texts.setdefault(name.strip(), " ".join(text.split()))
    return texts


def public_rows():
    """Yield a row for each name of the package, in the order of `torchrl_ext.__all__`: a link, and what it is."""
    import torchrl_ext as tx

    for name in tx.__all__:
        found = getattr(tx, name)
        if isinstance(found, str):
            continue  # the version
        role, home = "mod", getattr(found, "__module__", None)
        if home is not None:
            role = "class" if inspect.isclass(found) else "func"
        target = f"{home}.{name}" if home is not None else found.__name__
        summary = inspect.getdoc(found).partition("\n")[0].replace("``", "`")
        yield f"| {{{role}}}`tx.{name} <{target}>` | {summary} |"


def public_first():
    """Have the page of a module begin with the names of the package: autodoc follows ``__all__``."""
    import torchrl_ext as tx

    for home in {getattr(getattr(tx, name), "__module__", "") for name in tx._HOME} - {""}:
        sys.modules[home].__all__.sort(key=lambda name: name not in tx._HOME)


def command_lines(name):
    """Yield the reference of one command, or of each of its actions, as lines of Markdown read off its typer app."""

    import typer

    from torchrl_ext.cli.frame import app_of

    root = typer.main.get_command(app_of(name))
    commands = {name: root}
    if hasattr(root, "commands"):
        commands = {f"{name} {action}": command for action, command in root.commands.items()}
    for title, command in commands.items():
        context = typer.Context(command, info_name=title)
        usage = re.sub(r"[{}]", "", " ".join(command.collect_usage_pieces(context)))
        yield from ("", "```text", f"torchrl-ext {title} {usage}", "```", "", *command.help.splitlines(), "")
        yield from ("| option | |", "|---|---|")
        for parameter in command.params:
            record = parameter.get_help_record(context)
            if record is not None and "-completion" not in record[0]:
                option, text = (cell.replace("|", "\\|") for cell in record)
                yield f"| `{option}` | {text} |"


def setup(app):
    """Adds ``config-fields``, ``cli-command`` and ``public-names``: tables that are read off the code at build time."""
    from docutils import nodes
    from docutils.parsers.rst import Directive
    from docutils.statemachine import StringList

    class ConfigFields(Directive):
        required_arguments = 1

        def run(self):
            (what,) = self.arguments
            fields, owners = settings("update" if what == "flags" else what)
            texts = explained(owners)
            rows = ["| setting | type | default | |", "|---|---|---|---|"]
            for field in fields:
                default = "required" if field.default is dataclasses.MISSING else f"`{field.default!r}`"
                name = f"--{field.name.replace('_', '-')}" if what == "flags" else field.name
                cells = (f"`{name}`", f"`{field.type}`", default, texts[field.name])
                rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
            table = nodes.container()
            self.state.nested_parse(StringList(rows), 0, table)
            return table.children

    class CliCommand(Directive):
        required_arguments = 1

        def run(self):
            reference = nodes.container()
            self.state.nested_parse(StringList(list(command_lines(self.arguments[0]))), 0, reference)
            return reference.children

    class PublicNames(Directive):
        def run(self):
            table = nodes.container()
            self.state.nested_parse(StringList(["| name | |", "|---|---|", *public_rows()]), 0, table)
            return table.children

    def link_notebooks(app, page, source):
        """Make links work that point from ``docs/`` to ``tutorials/`` in the repository, and back."""
        source[0] = source[0].replace("](../tutorials/", "](tutorials/").replace("](../docs/", "](../")

    def clear(app):  # autosummary keeps the pages of modules that are gone, and Sphinx then warns of them
        shutil.rmtree(Path(app.srcdir, "generated"), ignore_errors=True)

    app.connect("builder-inited", clear, priority=1)
    app.connect("source-read", link_notebooks)
    app.add_directive("config-fields", ConfigFields)
    app.add_directive("cli-command", CliCommand)
    app.add_directive("public-names", PublicNames)
    public_first()
    shutil.rmtree(NOTEBOOKS, ignore_errors=True)
    shutil.copytree(NOTEBOOKS.parents[1] / "tutorials", NOTEBOOKS)  # Sphinx reads nothing outside its folder
