"""Variables: misspelt, contradictory, left over, wrong advice; and the ones that are fine."""

from __future__ import annotations

import pytest

from diag.probes.host_variables import known
from tests.diag.probes.hosts import host, said


def findings(world: int = 64, **variables: str) -> list[tuple[str, str, str]]:
    """(variable, kind, severity) of what is said."""
    return [(f.numbers["variable"], f.numbers["kind"], f.severity)
            for f in said(host(variables=variables, world_size=world)) if f.cause == "env_variable"]


@pytest.mark.parametrize("name, near", [
    ("NCCL_SOCKET_IFNAM", "NCCL_SOCKET_IFNAME"), ("NCCL_IB_TIME_OUT", "NCCL_IB_TIMEOUT"), ("NCCL_DEBG", "NCCL_DEBUG"),
    ("TORCH_NCCL_ASYNC_ERR_HANDLING", "TORCH_NCCL_ASYNC_ERROR_HANDLING"), ("GLOO_SOCKET_IFACE", "GLOO_SOCKET_IFNAME"),
    ("NCCL_P2P_DISABLED", "NCCL_P2P_DISABLE"), ("TORCH_DISTRIBUTED_DEBUGG", "TORCH_DISTRIBUTED_DEBUG")])
def test_a_misspelt_name_is_told_with_the_right_one(name: str, near: str) -> None:
    found = next(f for f in said(host(variables={name: "1"})) if f.cause == "env_variable")
    assert found.severity == "warning" and found.numbers["near"] == near and f"did you mean {near}?" in found.summary


def test_the_timeout_that_nobody_reads_says_where_it_is_set() -> None:
    (found,) = (f for f in said(host(variables={"NCCL_TIMEOUT": "1800"})) if f.cause == "env_variable")
    assert "init_process_group" in found.summary and "did you mean" not in found.summary


def test_names_of_nobody_and_of_plugins() -> None:
    assert findings(NCCL_QUUX_FROBNICATE="1") == [("NCCL_QUUX_FROBNICATE", "unknown", "info")]
    assert findings(NCCL_OFI_ANYTHING="1", FI_PROVIDER="efa", NCCL_HOME="/usr", TORCH_CUDA_ARCH_LIST="9.0") == []


@pytest.mark.parametrize("value, severity, world", [("LOC", "warning", 8), ("LOC", "warning", 64), ("PHB", "info", 64)])
def test_wrong_advice_about_p2p_between_hosts(value: str, severity: str, world: int) -> None:
    assert findings(world, NCCL_P2P_LEVEL=value) == [("NCCL_P2P_LEVEL", "wrong advice", severity)]


def test_p2p_level_inside_one_host_is_a_choice() -> None:
    assert findings(8, NCCL_P2P_LEVEL="NVL") == []


@pytest.mark.parametrize("variables, expected", [
    ({"NCCL_P2P_DISABLE": "1"}, "leftover"), ({"NCCL_SHM_DISABLE": "1"}, "leftover"),
    ({"CUDA_LAUNCH_BLOCKING": "1"}, "leftover"), ({"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, "leftover"),
    ({"NCCL_PROTO": "LL128"}, "leftover"), ({"NCCL_IB_DISABLE": "1"}, "leftover"),
    ({"NCCL_IB_DISABLE": "1", "NCCL_IB_HCA": "mlx5_0"}, "contradiction"),
    ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segment:True"}, "unknown"), ({"NCCL_DEBUG": "VERBOSE"}, "bad value"),
    ({"CUDA_VISIBLE_DEVICES": ""}, "leftover"), ({"CUDA_VISIBLE_DEVICES": "0,1,9"}, "bad value"),
    ({"NCCL_IB_TIMEOUT": "5"}, "leftover"), ({"NCCL_IB_TIMEOUT": "99"}, "bad value"),
    ({"NCCL_ALGO": "Rign"}, "bad value"), ({"NCCL_ALGO": "allreduce:ring;broadcast:tre"}, "bad value"),
    ({"NCCL_PROTO": "LL129"}, "bad value"), ({"NCCL_TIMEOUT": "1800"}, "unknown"),
    ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:true"}, "bad value"),
    ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:abc"}, "bad value")])
def test_what_is_wrong_with_a_value(variables: dict[str, str], expected: str) -> None:
    assert expected in {kind for _, kind, severity in findings(**variables) if severity == "warning"}


@pytest.mark.parametrize("variables", [
    {"NCCL_P2P_DISABLE": "0"}, {"NCCL_DEBUG": "INFO"}, {"CUDA_LAUNCH_BLOCKING": "0"}, {"NCCL_IB_TIMEOUT": "22"},
    {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,roundup_power2_divisions:[256:1,512:2]"},
    {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}, {"NCCL_ALGO": "Ring"},
    {"NCCL_ALGO": "^tree,collnetdirect"}, {"NCCL_ALGO": "allreduce:tree,NVLS;broadcast:ring"},
    {"NCCL_PROTO": "^LL128"}, {"PYTORCH_ALLOC_CONF": "max_split_size_mb:128,garbage_collection_threshold:0.8"}])
def test_what_is_not(variables: dict[str, str]) -> None:
    assert [item for item in findings(**variables) if item[2] != "info"] == []


def test_without_infiniband_switching_it_off_is_no_fault() -> None:
    found = said(host(ib=[], variables={"NCCL_IB_DISABLE": "1"}))
    assert [f for f in found if f.cause == "env_variable"] == []


def test_the_data_file_agrees_with_itself() -> None:
    table = known()
    names = set(table.nccl) | set(table.torch)
    assert len(names) > 400 and names >= set(table.renamed.values())
    assert {rule.name for rule in table.rules} <= names | {"CUDA_LAUNCH_BLOCKING", "NCCL_TIMEOUT"}
    assert all(rule.severity in ("info", "warning") and rule.fix for rule in table.rules)
