"""What a run was, without its secrets."""

from __future__ import annotations

import json
import os
import sys

import pytest

from pdtrain.recorder import prepare_environment, write_config, write_environment
from pdtrain.recorder.environment import REDACTED, redact_command, redact_variables
from tests.recorder.helpers import run


@pytest.mark.parametrize("given, kept", [
    (["train", "--wandb-api-key", "abc", "--lr", "1"], ["train", "--wandb-api-key", REDACTED, "--lr", "1"]),
    (["--token=abc", "hf_token=abc"], [f"--token={REDACTED}", f"hf_token={REDACTED}"]),
    (["--set", "data.password=abc"], ["--set", f"data.password={REDACTED}"]),
    (["--data", "https://me:abc@host/x"], ["--data", f"https://{REDACTED}@host/x"]),
    (["x", "hf_abcdefghijklmnopqrstuv"], ["x", REDACTED]),
    (["--secret", "--next"], ["--secret", "--next"]),
    (["--tokenizer", "bpe.json", "--tokens=5", "--set", "data.text_key=body", "--author=me"],
     ["--tokenizer", "bpe.json", "--tokens=5", "--set", "data.text_key=body", "--author=me"]),
    (["--max-tokens", "5", "--num_tokens_per_step=7", "--keyboard", "de"],
     ["--max-tokens", "5", "--num_tokens_per_step=7", "--keyboard", "de"]),
])
def test_secrets_leave_the_command_line(given, kept):
    assert redact_command(given) == kept


def test_only_variables_that_matter_are_kept_and_no_secret():
    assert redact_variables({
        "NCCL_DEBUG": "INFO", "HOME": "/root", "AWS_SECRET_ACCESS_KEY": "abc", "SLURM_JWT": "abc", "RANK": "3",
        "TORCH_API_TOKEN": "abc", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": "0,1",
        "PDTRAIN_STORE": "redis://u:abc@h",
    }) == {
        "NCCL_DEBUG": "INFO", "RANK": "3", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": "0,1",
        "SLURM_JWT": REDACTED, "TORCH_API_TOKEN": REDACTED, "PDTRAIN_STORE": f"redis://{REDACTED}@h",
    }


def test_the_environment_document(tmp_path, monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    write_environment(tmp_path, {"groups": {"tp": [[0, 1]]}, "nan": float("nan")})
    found = json.loads((tmp_path / "environment.json").read_text())
    assert found["groups"] == {"tp": [[0, 1]]} and found["nan"] == "NaN"
    assert found["environment"]["NCCL_DEBUG"] == "INFO"
    assert found["versions"]["python"] and found["versions"]["torch"]
    assert found["host"]["name"] and found["host"]["cpus"] == os.cpu_count() and found["host"]["memory_bytes"] > 0
    assert found["command"] == sys.orig_argv


def test_the_configuration_is_replaced_as_one_step(tmp_path):
    write_config(tmp_path / "new", "a = 1\n")
    assert write_config(tmp_path / "new", "a = 2\n").read_text() == "a = 2\n"
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["config.toml"]


def test_flight_recorder_switches(tmp_path):
    environ = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
    got = prepare_environment(tmp_path, 123, environ)
    assert got == environ
    assert environ["TORCH_FR_BUFFER_SIZE"] == "123"
    assert environ["TORCH_FR_DUMP_TEMP_FILE"] == str(tmp_path / "dumps" / "flight_recorder_")
    assert environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0", "what the user has set stays"
    assert (tmp_path / "dumps").is_dir(), "c10d's own writer makes no directory"


def test_no_entries_means_off(tmp_path):
    assert prepare_environment(tmp_path, 0, {})["TORCH_FR_BUFFER_SIZE"] == "0"
    assert not (tmp_path / "dumps").exists()


def test_preparing_imports_no_torch(tmp_path):
    done = run("""
        import sys
        from pdtrain.recorder import prepare_environment
        prepare_environment(sys.argv[1], 100)
        assert "torch" not in sys.modules
        """, tmp_path)
    assert done.returncode == 0, done.stderr
