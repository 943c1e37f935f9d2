"""Where ray is not installed, its names say what to install, and nothing else changes."""

from tests.processes import python

WITHOUT = "import sys; sys.modules['ray'] = None\nimport torchrl_ext as tx\n"


def test_its_names_say_what_to_install():
    python(
        WITHOUT + "try:\n"
        "    tx.make_engine('ray', engine=object())\n"
        "except tx.errors.ConfigError as error:\n"
        "    assert 'torchrl_ext[ray]' in str(error), error\n"
        "else:\n"
        "    raise AssertionError"
    )
