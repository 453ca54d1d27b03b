"""Hosts side by side: the odd one out is marked, two that differ accuse nobody, alike ones are silent."""

from __future__ import annotations

from diag.detectors.env_hosts import merged
from diag.probes.host_compare import compare
from diag.probes.host_facts import HostFacts
from diag.probes.host_judge import judge
from diag.probes.host_words import Place
from diag.schema import Finding
from tests.diag.probes.hosts import GIB, gpu, host


def difference(*hosts: HostFacts) -> Finding | None:
    return next(iter(compare([Place(facts, hosts=len(hosts)) for facts in hosts])), None)


def test_alike_hosts_are_silent() -> None:
    own = [host(f"n{i}", variables={"RANK": str(i), "MASTER_ADDR": "n0", "HOME": f"/home/{i}"}) for i in range(4)]
    assert difference(*own) is None
    assert difference(host("n0", memory_total=2048 * GIB), host("n1", memory_total=2047 * GIB)) is None


def test_the_odd_one_is_marked() -> None:
    odd = host("n2", driver="535.104.05", variables={"NCCL_DEBUG": "WARN", "NCCL_IB_HCA": "mlx5", "NCCL_ALGO": "Ring"})
    found = difference(host("n0"), host("n1"), odd, host("n3"))
    assert found is not None and found.severity == "warning" and found.where.hosts == ["n2"]
    rows = {row["what"]: row for row in found.numbers["differences"]}
    assert rows["driver"]["odd"] == "n2" and rows["driver"]["n2"] == "535.104.05 ←"
    assert rows["driver"]["n0"] == rows["driver"]["usual"] == "550.90.07"
    assert rows["NCCL_ALGO"]["n2"] == "Ring ←" and set(rows) == {"driver", "NCCL_ALGO"}


def test_of_two_that_differ_nobody_is_guilty() -> None:
    found = difference(host("n0"), host("n1", gpus=[gpu(i) for i in range(7)]))
    assert found is not None and found.where.hosts == [] and "←" not in str(found.numbers)


def test_another_kernel_is_a_remark() -> None:
    found = difference(host("n0"), host("n1"), host("n2", kernel="6.8.0"))
    assert found is not None and found.severity == "info"


def test_hosts_of_one_name_are_told_apart() -> None:
    found = difference(host("vm", ranks=[0]), host("vm", ranks=[1]), host("vm", ranks=[2], driver="1.2.3"))
    assert found is not None and found.where.hosts == ["vm (rank 2)"]


def test_one_fault_of_all_hosts_is_one_finding() -> None:
    hosts = [host(f"n{i}", limits={"nofile": (256, 256)}) for i in range(5)]
    said = list(merged([(facts.host, item) for facts in hosts for item in judge(Place(facts, hosts=5))]))
    found = [item for item in said if isinstance(item, Finding) and item.cause == "too_many_open_files"]
    assert len(found) == 1 and found[0].where.hosts == [f"n{i}" for i in range(5)]
    assert found[0].summary.startswith("5 hosts alike")


def test_of_many_hosts_only_the_odd_ones_are_columns() -> None:
    hosts = [host(f"n{i}", **({"driver": "1.2.3"} if i in (7, 40) else {})) for i in range(64)]
    found = difference(*hosts)
    assert found is not None and found.where.hosts == ["n7", "n40"]
    assert list(found.numbers["differences"][0]) == ["what", "odd", "usual", "n7", "n40"]
    assert [item.text for item in found.evidence] == ["driver: 1.2.3 ←"] * 2
