"""Secrets in a configuration are refused by their names or their looks, and never told."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from slurm_train.config.secrets import is_secret, secret_faults

WORD = "c3dtqZ9x81mm0Q"  # as no service makes them


@pytest.mark.parametrize(
    "key",
    [
        "launcher.env.WANDB_API_KEY",
        "launcher.env.HF_TOKEN",
        "launcher.env.DB_PASSWORD",
        "train.callbacks.log.apiKey",
        "train.callbacks.log.webhook",
        "data.access-key",
        "data.credentials",
        "model.authToken",
    ],
)
def test_a_name_tells(key: str) -> None:
    config = OmegaConf.create({})
    OmegaConf.update(config, key, WORD)
    (fault,) = secret_faults(config)
    assert fault.key == key
    assert WORD not in str(fault)


def test_a_variable_is_to_be_exported() -> None:
    (fault,) = secret_faults(OmegaConf.create({"launcher": {"env": {"HF_TOKEN": WORD}}}))
    assert str(fault) == (
        "launcher.env.HF_TOKEN: looks like a secret, and would be written into config.yaml; "
        "export HF_TOKEN in the shell where you submit: jobs inherit it"
    )


@pytest.mark.parametrize(
    "value",
    [
        "ghp_" + "a1" * 15,
        "hf_" + "aB" * 15,
        "AKIA" + "A1" * 8,
        "https://me:word@example.com/data",
        "see https://hooks.slack.com/services/T0/B0/x",
        "-----BEGIN RSA PRIVATE KEY-----",
    ],
)
def test_looks_tell(value: str) -> None:
    (fault,) = secret_faults(OmegaConf.create({"data": {"root": value}}))
    assert fault.key == "data.root" and value not in str(fault)


def test_a_setup_line() -> None:
    lines = ["module load cuda", f"export WANDB_API_KEY={WORD}", "export TOKEN=$MINE", 'export A_TOKEN="$(cat f)"']
    (fault,) = secret_faults(OmegaConf.create({"launcher": {"setup": lines}}))
    assert fault.key == "launcher.setup.1" and "export WANDB_API_KEY in the shell" in fault.remedy


@pytest.mark.parametrize(
    "name", ["max_tokens", "tokenizer", "n_keys", "key_dim", "monkey", "author", "tokens", "api", "key", "passes"]
)
def test_other_names_are_none(name: str) -> None:
    assert not is_secret(name)


def test_values_that_are_no_secrets() -> None:
    plain = {
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "token_path": "/a/long/enough/path",
        "password": "",
        "secret": 7,
    }
    url = {"root": "https://example.com/a:b@c", "other": "/data/hf_cache/sk-learn"}
    assert list(secret_faults(OmegaConf.create({"model": plain, "data": url}))) == []
