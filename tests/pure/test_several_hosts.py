"""Several machines: what options and launchers say of them, and who is awaited."""

import contextlib
import os
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import espalier
from benchmarks._namespaces import namespaces
from espalier.mesh import hosts
from espalier.mesh.hosts import Hosts, Meeting, Task, expand, find_hosts, told_by

SLURM = {
    "SLURM_JOB_ID": "70123",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_MCA_orte_hnp_uri": "123.0;tcp://10.0.0.5,172.17.0.1:4242",
}


def test_slurm():
    assert told_by(SLURM, "gpu08") == Hosts(2, 1, "gpu07", 30123, "SLURM")
    many = SLURM | {"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5", "SLURM_LOCALID": "1"}
    task = told_by(many, "gpu08")
    assert isinstance(task, Task)
    assert task.environment["RANK"] == "5" and task.environment["WORLD_SIZE"] == "8"
    assert task.environment["MASTER_ADDR"] == "gpu07" and task.environment["LOCAL_RANK"] == "1"
    # in a batch script, or a shell of salloc, no step has begun
    assert told_by({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}, "gpu07") is None
    assert told_by(SLURM | {"RANK": "0", "WORLD_SIZE": "2"}, "gpu07") is None


def test_mpi_says_where_the_first_is_or_what_to_say():
    """Silence would let every process start a run of its own."""
    hydra = {"PMI_SIZE": "4", "PMI_RANK": "3", "MPI_LOCALNRANKS": "4", "MPI_LOCALRANKID": "3"}
    task = told_by(hydra, "a")
    assert isinstance(task, Task) and task.environment["MASTER_ADDR"] == "127.0.0.1"
    assert task.environment["RANK"] == task.environment["LOCAL_RANK"] == "3"
    apart = hydra | {"MPI_LOCALNRANKS": "1", "MPI_LOCALRANKID": "0"}
    newer = OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": "", "PMIX_SERVER_URI2": "prterun-a@1.0;tcp4://127.0.0.1:42"}
    for silent in (apart, newer):
        with pytest.raises(ValueError, match="MASTER_ADDR is missing"):
            told_by(silent, "a")
    assert told_by(apart | {"MASTER_ADDR": "a"}, "b") == Hosts(4, 3, "a", 29500, "MPI")
    # mpirun within a job of SLURM's has started one helper a machine by srun
    within = newer | SLURM | {"SLURM_JOB_NODELIST": "gpu[07-08]", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    within = told_by(within | {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"}, "gpu08")
    assert isinstance(within, Task) and within.environment["WORLD_SIZE"] == "4"
    assert within.environment["MASTER_ADDR"] == "gpu07"
    by_srun = SLURM | {"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALNRANKS": "1"}
    assert told_by(by_srun, "gpu08") == told_by(SLURM, "gpu08")


def test_processes_of_a_launcher_that_train_alone_are_told(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": ""}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(espalier.Mesh, "built", (None, {}))
    with pytest.warns(UserWarning, match="RANK and WORLD_SIZE are not set: each is alone"):
        espalier.Mesh.from_env({"alone": 1}, "cpu")
    with pytest.raises(ValueError, match=r"needs 2 rank\(s\).*srun or mpirun has started several"):
        espalier.Mesh.from_env({"data": 2}, "cpu")


def test_open_mpi_and_kubernetes():
    assert told_by(OPEN_MPI, "b") == Hosts(2, 1, "10.0.0.5", 29500, "Open MPI")
    task = told_by(OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "b")
    assert isinstance(task, Task) and task.environment["LOCAL_WORLD_SIZE"] == "2"
    kubeflow = {"PET_NNODES": "3", "PET_NODE_RANK": "2", "PET_RDZV_ENDPOINT": "job-master-0:23456"}
    assert told_by(kubeflow, "x") == Hosts(3, 2, "job-master-0", 23456, "Kubeflow")
    indexed = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}
    assert told_by(indexed, "tune-1.workers", nodes=2) == Hosts(2, 1, "tune-0.workers", 29500, "Kubernetes")
    assert told_by(indexed, "tune-1") is None and told_by({}, "here") is None


@pytest.mark.parametrize(
    ("short", "names"),
    [
        ("a", ["a"]),
        ("a,b7", ["a", "b7"]),
        ("a[01-03,7],b", ["a01", "a02", "a03", "a7", "b"]),
        ("n[9-11]-ib", ["n9-ib", "n10-ib", "n11-ib"]),
    ],
)
def test_lists_of_nodes(short, names):
    assert expand(short) == names


def test_options(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert find_hosts(None, None, None) is None and find_hosts(1, None, None) is None
    assert find_hosts(2, 1, "first") == Hosts(2, 1, "first", 29500)
    assert find_hosts(2, 0, "10.0.0.1:99").endpoint == "10.0.0.1:99"
    with pytest.raises(ValueError, match="several machines need --node-rank K, --rdzv HOST:PORT too"):
        find_hosts(2, None, None)
    with pytest.raises(ValueError, match="--node-rank 2: expected 0 to 1"):
        find_hosts(2, 2, "first")
    with pytest.raises(ValueError, match="--rdzv first:no: expected HOST:PORT"):
        find_hosts(2, 1, "first:no")
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    assert find_hosts(None, None, None) == Hosts(2, 1, "gpu07", 30123, "SLURM")
    assert find_hosts(2, None, "other:5") == Hosts(2, 1, "other", 5)
    for name in SLURM:
        monkeypatch.delenv(name)
    for name, value in (OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": ""}).items():
        monkeypatch.setenv(name, value)
    assert find_hosts(None, None, "first:7") == Hosts(2, 1, "first", 7, "Open MPI")
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    for name in OPEN_MPI:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    with pytest.raises(ValueError, match="each rank was started by a launcher"):
        find_hosts(2, None, None)


def test_who_is_awaited(monkeypatch):
    monkeypatch.setattr(hosts, "_SILENT", 0.0)
    first = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    said = {0: [], 1: []}
    with Meeting(Hosts(2, 1, "127.0.0.1", 9), 2, said[1].append):
        until(lambda: said[1])
    assert "node 1 (ranks 2 to 3)" in said[1][0] and "nothing answers at 127.0.0.1:9" in said[1][0]
    with Meeting(Hosts(2, 0, "127.0.0.1", first.port), 2, said[0].append):
        until(lambda: said[0])
        assert said[0][0].endswith("waits for node 1 (ranks 2 to 3)")
        with Meeting(Hosts(2, 1, "127.0.0.1", first.port), 2, said[1].append):
            until(lambda: len(said[0]) > 1)
    assert said[0][1].endswith("all 2 nodes are there")


def until(true):
    end = time.monotonic() + 30
    while not true() and time.monotonic() < end:
        time.sleep(0.05)
    assert true()


SCRIPT = """
import os
import torch.distributed as dist
dist.init_process_group("gloo")
told = [None] * dist.get_world_size()
dist.all_gather_object(told, (os.environ["RANK"], os.environ["LOCAL_RANK"], os.readlink("/proc/self/ns/net")))
print("met", len({host for *_, host in told}), sorted(told)[0][:2], flush=True)
dist.destroy_process_group()
"""


def test_a_loopback_for_several_machines_is_refused(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(hosts, "own_address", lambda host, port: "10.77.0.2")
    with pytest.raises(ValueError, match=r"GLOO_SOCKET_IFNAME=lo: no other machine .* has 10\.77\.0\.2"):
        hosts.settings_for(Hosts(2, 1, "10.77.0.1", 29500, "the options"))
    monkeypatch.setattr(hosts, "own_address", lambda host, port: host)
    assert hosts.settings_for(Hosts(2, 1, "127.0.0.1", 29500, "the options")) == {}


def can_play_hosts():
    """Whether network namespaces may be made here."""
    with contextlib.suppress(OSError), namespaces(1, "eth"):
        return True
    return False


def test_two_hosts_meet(tmp_path):
    if not can_play_hosts():
        pytest.skip("needs the right to make network namespaces")
    (tmp_path / "script.py").write_text(SCRIPT)
    with namespaces(2, "eth") as names:
        command = [sys.executable, "-m", "espalier", "run", "--nodes", "2", "--rdzv", "10.77.0.1:29511"]
        # what a test before this one has set for ranks of one host holds for no other
        silent = {name: x for name, x in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
        given = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": silent}
        started = []
        for node in (1, 0):
            of_node = [*command, "--node-rank", str(node), str(tmp_path / "script.py")]
            started.append(subprocess.Popen(["ip", "netns", "exec", names[node], *of_node], **given))
            if node:  # the first is late
                said = ""
                while "waits for node 0 (rank 0): nothing answers at 10.77.0.1:29511" not in said:
                    line = started[0].stdout.readline()
                    assert line, said
                    said += line
        late: list[str] = []
        try:
            outputs = [each.communicate(timeout=240)[0] for each in started]
        except subprocess.TimeoutExpired:
            for each in started:
                each.kill()
                late.append(each.communicate()[0])
        assert not late, "\n--\n".join(late)
    assert [each.returncode for each in started] == [0, 0], outputs
    assert "met 2 ('0', '0')" in outputs[1] and "all 2 nodes are there" in outputs[0]


def in_a_fake_world() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    x = espalier.distribute_tensor(torch.ones(4, 6), mesh, [espalier.Shard(0)], src_data_rank=None)
    assert x.to_local().shape == (2, 6) and (x @ x.T).full_tensor().shape == (4, 4)
    dist.destroy_process_group()


def test_torchs_fake_world_has_meshes(forked) -> None:
    """Its store holds nothing, and no other rank is there to say where it runs."""
    process = forked.Process(target=in_a_fake_world)
    process.start()
    process.join()
    assert process.exitcode == 0
