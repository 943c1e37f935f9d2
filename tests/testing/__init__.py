"""Tests of what `torchrl_ext.testing` ships."""

KIT = """
import os, sys
import pytest
os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
os.chdir(sys.argv[1])  # away from this repository's own options
kit = "torchrl_ext.testing.engine"
settings = ["-p", "no:cacheprovider", "-p", f"{kit}.plugin", "-q", "-c", os.devnull, "--rootdir", sys.argv[1]]
sys.exit(pytest.main([*settings, "--pyargs", kit, *sys.argv[2:]]))
"""
"""Runs the kit in a folder, with options of its own."""
