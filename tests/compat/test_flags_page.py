"""The page that leads from slime's and vime's flags to ours names nothing that is not there, and leaves nothing out."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re

import torchrl_ext as tx
from tests.processes import ROOT

ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs" / "flags.md").read_text().splitlines()
    if line.startswith("| `")
]


def test_every_field_and_parameter_that_the_page_names_exists():
    named = [found for row in ROWS for found in re.findall(r"`(\w+)[.(](\w+)\)?`", row[1])]
    assert len(named) >= 15
    for cls, name in named:
        assert name in inspect.signature(getattr(tx, cls)).parameters, (cls, name)


def test_every_option_of_the_config_is_on_the_page_under_its_flag():
    parser = argparse.ArgumentParser()
    tx.WeightUpdateConfig.add_arguments(parser)
    flags = {flag for action in parser._actions for flag in action.option_strings} - {"-h", "--help"}
    rows = {row[0].strip("`"): row[1] for row in ROWS}
    assert flags <= set(rows)
    for option in dataclasses.fields(tx.WeightUpdateConfig):
        assert f"WeightUpdateConfig.{option.name}" in rows[f"--{option.name.replace('_', '-')}"]


def test_encodings_that_the_page_names_exist():
    (row,) = [row for row in ROWS if row[0] == "`--update-weight-encoding`"]
    assert set(re.findall(r"`(\w+)`", row[2])) <= set(tx.DeltaTransport.encodings())


SLIMES = """
update-weight-mode update-weight-transport update-weight-disk-dir update-weight-disk-keep-files
update-weight-delta-encoding update-weight-delta-checksum custom-update-weight-post-write-path
update-weight-local-checkpoint-dir sglang-custom-pull-weights-pre-read-hook release-train update-weights-interval
update-weight-buffer-size rollout-external-engine-addrs sglang-router-ip sglang-router-port
sglang-router-request-timeout-secs check-weight-update-equal update-weight-encoding update-weight-delta-dir
update-weight-delta-keep-files custom-delta-pre-push-path
"""
VIMES = """
flush-cache-interval vllm-custom-pull-weights-pre-read-hook vllm-router-ip vllm-router-port
router-request-timeout-secs vllm-weight-transfer-timeout-sec update-weight-local-checkpoint-dir
"""


def flags_on(page):
    lines = (ROOT / "docs" / page).read_text().splitlines()
    return {
        flag for line in lines if line.startswith("| `") for flag in re.findall(r"`--([a-z-]+)`", line.split("|")[1])
    }


def test_every_option_of_slime_and_vime_has_a_row_on_its_page_or_on_the_one_of_both():
    shared = flags_on("flags.md")
    assert set(SLIMES.split()) <= shared | flags_on("from_slime.md")
    assert set(VIMES.split()) <= shared | flags_on("from_vime.md")
