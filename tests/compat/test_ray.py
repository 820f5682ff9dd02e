"""The recipe for Ray Train, on a cluster of two nodes of one machine, whose second rank is killed once."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import json, os, runpy, signal, sys
from pathlib import Path

import ray
import torch
from ray import train
from ray.cluster_utils import Cluster

root, out = sys.argv[1:]
sys.path.insert(0, root)
example = runpy.run_path(root + "/examples/ray_train.py")
loop, model, batch = (example[name] for name in ("on_each_worker", "Model", "batch"))
settings = {"out": out, "plan": {"data": 1, "tensor": 2}, "steps": 7, "every": 2}
TorchTrainer, ScalingConfig, RunConfig, FailureConfig = (
    example[name] for name in ("TorchTrainer", "ScalingConfig", "RunConfig", "FailureConfig")
)


def killed_once(config):
    torch.set_default_dtype(torch.float64)
    rank, fallen, report = os.environ["RANK"], Path(out, "fallen"), train.report

    def reported(metrics):
        report(metrics)  # and steps 5 and 6 are in no checkpoint
        if rank == "1" and metrics["step"] == 6 and not fallen.exists():
            fallen.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    train.report = reported
    loop(config)


cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
cluster.add_node(num_cpus=1)
try:
    ray.init(address=cluster.address)
    TorchTrainer(
        killed_once,
        train_loop_config=settings,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="ray", storage_path=out, failure_config=FailureConfig(max_failures=1)),
    ).fit()
finally:
    ray.shutdown()
    cluster.shutdown()

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
net = model()
optimizer, losses = torch.optim.AdamW(net.parameters(), lr=1e-2), []
for step in range(settings["steps"]):
    x, y = batch(step)
    loss = torch.nn.functional.mse_loss(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
Path(out, "plain.json").write_text(json.dumps(losses))
"""


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install 'ray>=2.50'")
def test_the_recipe_on_two_nodes_with_a_rank_that_is_killed(tmp_path: Path) -> None:
    """Every step's loss is that of one process, in float64, also of those after the checkpoint."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    out = tmp_path / "run"
    out.mkdir()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, str(program), str(ROOT), str(out)],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert (out / "fallen").exists()
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, 8))
    plain = json.loads((out / "plain.json").read_text())
    assert [record["loss"] for record in records] == pytest.approx(plain, rel=1e-12)
    facts = json.loads((out / "run.json").read_text())
    assert facts["status"] == "finished" and len(facts["ranks"]) == 2
    assert (out / "report.html").exists()
