"""Config dataclasses of transports: what a constructor takes, and nothing else."""

import dataclasses
import inspect
import pickle

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, ValidationError

import torchrl_ext as tx
from torchrl_ext.configs.derived import parameters, transport_config
from torchrl_ext.errors import ConfigError
from torchrl_ext.registry import transports

ROOTED = {"disk": {"root": "updates"}, "delta": {"root": "updates"}}


def config_of(name, tmp_path, **settings):
    places = {key: str(tmp_path / value) for key, value in ROOTED.get(name, {}).items()}
    return transport_config(name)(**places, **settings)


@pytest.mark.parametrize("name", sorted(tx.transports()))
def test_the_fields_are_the_parameters_of_the_constructor_with_its_defaults(name):
    wanted = {
        name: dataclasses.MISSING if parameter.default is inspect.Parameter.empty else parameter.default
        for name, parameter in inspect.signature(transports.load(name)).parameters.items()
    }
    assert {field.name: field.default for field in dataclasses.fields(transport_config(name))} == wanted


@pytest.mark.parametrize("name", sorted(tx.transports()))
def test_every_field_has_one_line_of_help(name):
    for field in dataclasses.fields(transport_config(name)):
        assert field.metadata["help"], field.name
        assert "\n" not in field.metadata["help"]


@pytest.mark.parametrize("name", sorted(tx.transports()))
def test_a_config_makes_its_transport(name, tmp_path):
    made = config_of(name, tmp_path, timeout_s=3.0).make()
    assert type(made) is transports.load(name)
    assert made.timeout_s == 3.0
    made.shutdown()


@pytest.mark.parametrize("name", sorted(tx.transports()))
def test_a_config_crosses_processes(name, tmp_path):
    config = config_of(name, tmp_path)
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize("name", sorted(tx.transports()))
def test_omegaconf_knows_every_field_and_no_other(name):
    node = OmegaConf.structured(transport_config(name))
    assert set(node) == set(inspect.signature(transports.load(name)).parameters)
    with pytest.raises(ConfigKeyError, match="timeout"):
        OmegaConf.merge(node, {"timeout": 3})


@pytest.mark.parametrize(
    ("name", "value"),
    [("timeout_s", "soon"), ("keep_files", "perhaps"), ("keyframe_every", 1.5), ("root", ["a", "b"])],
)
def test_a_value_of_another_type_is_refused(name, value):
    with pytest.raises(ValidationError, match=name):
        OmegaConf.merge(OmegaConf.structured(transport_config("delta")), {name: value})


def test_what_the_transport_refuses_is_refused_by_its_config():
    with pytest.raises(ConfigError, match="carrier 'disk' needs a root"):
        transport_config("delta")().make()
    with pytest.raises(ConfigError, match="does not take these settings"):
        transport_config("memory")().make(path="/tmp")


def test_types_are_those_that_omegaconf_can_check():
    kinds = {field.name: field.type_name for field in parameters(tx.DeltaTransport)}
    assert kinds["root"] == "str | None"
    assert kinds["keyframe_every"] == "int"
    assert kinds["timeout_s"] == "float"
    assert kinds["settings"] == "Any"
